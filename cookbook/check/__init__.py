"""Whether cells may run, what they need and what they cost, known before a job."""
