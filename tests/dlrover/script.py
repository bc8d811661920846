"""A training script with arguments."""

import os
import sys

if __name__ == "__main__":
    with open(os.path.join(sys.argv[2], f"script-{os.environ['RANK']}"), "w") as file:
        file.write(" ".join(sys.argv[1:]))
