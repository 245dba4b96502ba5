"""Predicts a cell's memory, traffic and step time, without torch and without building it."""
