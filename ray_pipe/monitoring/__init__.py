"""What a cluster shows of a run: Ray metrics, the Jobs view, and files for Prometheus and Grafana.

`catalogue` is the one list of metrics. `readings` makes numbers of a step's records, `exporter`
hands them to Ray, `panels` and `provisioning` make the Grafana dashboard and its surroundings, and
`python -m ray_pipe.monitoring DIR` writes them. Neither torch nor ray is loaded for that.
"""
