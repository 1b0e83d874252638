"""Fuzzing of every reader by atheris: `make fuzz`."""
