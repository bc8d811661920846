"""Several machines on this one: network namespaces with a hosts file of their own, for ranks of a gang."""
