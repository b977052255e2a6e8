"""How replicas agree: strategies over one exchange, in virtual time and in earnest."""
