"""The parts of the API that say how the agent is: health, metrics, the hive itself.

Needs:  StatusCollector, Metrics, HiveView.
Gives:  StatusOperations, Inspection.
"""
