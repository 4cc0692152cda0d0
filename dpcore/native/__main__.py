"""``python -m dpcore.native``: compiles the optional part and says where it is."""

import sys

from dpcore.native import NativeBuildError, build

if __name__ == "__main__":
    try:
        print(build())
    except NativeBuildError as error:
        sys.exit(str(error))
