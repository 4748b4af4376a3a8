"""How a session comes to be: the run is found here or in a source, its plan is compared, and a session is opened or adopted.

May import supervisor, launch, limits and all below them."""
