"""``python -m dpcore.native``: compiles the kernels into the user's cache and says where they are."""

import sys

from dpcore.native import NativeBuildError, build

if __name__ == "__main__":
    try:
        print(build())
    except NativeBuildError as error:
        sys.exit(str(error))
