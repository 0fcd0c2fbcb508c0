from common.world import main

main()
