"""Writes waves.csv: points of a smooth surface that a small network can learn. Always the same."""

import math

ROWS = 256

with open("waves.csv", "w") as file:
    file.write("x,y,height\n")
    for row in range(ROWS):
        # A lattice without visible rows: multiples of two irrational numbers.
        x = 2 * math.modf(row * math.sqrt(2))[0] - 1
        y = 2 * math.modf(row * math.sqrt(3))[0] - 1
        height = math.sin(3 * x) * math.cos(2 * y)
        file.write(f"{x:.6f},{y:.6f},{height:.6f}\n")
