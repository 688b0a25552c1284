from hypothesis import settings

# The same examples each time; and no deadline, as other tests run at the same time.
settings.register_profile("same", derandomize=True, database=None, deadline=None, max_examples=25)
settings.load_profile("same")
