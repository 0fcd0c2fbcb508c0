from common.serve.server import main

main()
