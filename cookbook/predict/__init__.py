"""What a cell needs and how long a step takes, counted without torch and without building it."""
