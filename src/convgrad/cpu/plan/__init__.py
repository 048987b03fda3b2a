"""What planners share: records, axes, costs, tuning; and the registry of algorithms that makes a plan."""
