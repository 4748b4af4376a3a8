"""What does: one loop on one thread (supervisor.py), and thin hands around it. The rules stand in core/."""
