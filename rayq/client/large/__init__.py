"""Large values: how producers send them and readers assemble them. Private."""
