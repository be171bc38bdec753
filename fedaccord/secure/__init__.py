"""Secure sums, SecAgg+: masks, the client's four stages, and the server's.

Bell, Bonawitz, Gascon, Lepoint, Raykova: Secure Single-Server Aggregation with (Poly)Logarithmic
Overhead. CCS 2020, eprint 2020/704. Bonawitz et al.: Practical Secure Aggregation for
Privacy-Preserving Machine Learning. CCS 2017, eprint 2017/281. All primitives are from libraries.

    setup   i makes two key pairs, for encryption and for masks       -> public keys
    share   i draws b_i; Shamir shares of b_i and of its mask key     -> one for each neighbour
    masked  y_i = q_i + PRG(b_i) + sum_{j > i} PRG(s_ij) - sum_{j < i} PRG(s_ij)   mod 2^32 or 2^64
    unmask  shares of b_i of the clients whose y_i arrived, and of the mask keys of the lost clients

The server adds up the y_i, reconstructs the b_i and the mask keys of the lost clients, and
subtracts these masks: the result is the sum of the q_i.
"""
