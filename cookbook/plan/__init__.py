"""The fastest layouts of a recipe that fit, by predicted time and memory."""
