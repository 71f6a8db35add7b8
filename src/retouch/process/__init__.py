"""The process and the machine it runs on: terminal, signals, threads and settings that all threads share."""
