"""Reading and writing by jobs of many tasks: Spark, Ray Data."""
