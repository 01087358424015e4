"""Entry point of the group ``vllm.general_plugins``: makes ``{"kv_connector": "PdConnector"}`` work by itself."""


def register() -> None:
    """Tell vLLM where PdConnector is. vLLM calls this in every process, possibly more than once."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    if "PdConnector" not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector("PdConnector", "pd_transfer.vllm.connector", "PdConnector")
