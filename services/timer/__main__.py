from tickwheel.services.timer.main import main

main()
