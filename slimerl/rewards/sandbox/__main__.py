"""`python -m slimerl.rewards.sandbox`: can a program be run here? Ends with 0, or with 1 and the reason."""

import sys

from slimerl.rewards.sandbox.execution import probe

if __name__ == "__main__":
    sys.exit(probe())
