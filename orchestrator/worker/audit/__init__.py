"""What a script's use of the SDK gives up: state that nothing saves, abilities that its loop does not have.

Looks at the script from outside, seldom, and changes nothing. May import: the data loaders, the state codec, the protocol.
"""
