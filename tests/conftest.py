"""What all tests share."""

pytest_plugins = ["rank_fixtures", "engine_fixtures"]
