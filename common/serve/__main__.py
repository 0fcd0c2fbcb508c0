from common import process  # noqa: F401  (first: a terminal without UTF-8)

# isort: split
from common.serve.server import main

main()
