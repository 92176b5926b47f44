"""specrs inside other stacks. One module a host; importing this folder imports none of them."""
