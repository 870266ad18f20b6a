"""Large values, as producers send them and readers put them together. Private."""
