"""Two arms of runs and a verdict: what a technique does here, and what a claim is worth."""
