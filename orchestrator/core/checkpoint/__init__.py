"""When checkpoints are saved, how early the last one before a time limit begins, and which ones are deleted. Ranks load
`retention`.

May import: nothing of the project.
"""
