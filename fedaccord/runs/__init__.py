"""Run directories: their files, checkpoints, and the meaning of their columns."""

from fedaccord.runs.directory import COMPLETED as COMPLETED
from fedaccord.runs.directory import RUNNING as RUNNING
from fedaccord.runs.directory import RunDirectory as RunDirectory
from fedaccord.runs.directory import flatten as flatten
from fedaccord.runs.directory import load_model as load_model
from fedaccord.runs.directory import status as status
from fedaccord.runs.directory import tables as tables
from fedaccord.runs.naming import make as make
from fedaccord.runs.naming import place as place
