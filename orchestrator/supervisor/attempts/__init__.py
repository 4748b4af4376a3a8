"""The attempts of a supervised session: launching them, waiting for their end, and watching them for hangs and memory pressure.

May import what kgorch.supervisor may, of its modules `live_session`, `recorder`, `checkpoint_records` and `metric_curves`.
"""
