"""`python -m mtppp`"""

from mtppp.cli.main import main

main()
