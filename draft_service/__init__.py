"""The draft service: guesses tokens ahead of the target."""
