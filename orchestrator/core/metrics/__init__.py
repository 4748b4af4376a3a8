"""The metrics of a run over its steps: their records and curves, and when a metric reaches its target. Ranks load
`metric_curve`.

May import: of kgorch.core codes.
"""
