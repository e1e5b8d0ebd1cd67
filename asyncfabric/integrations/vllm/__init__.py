"""asyncfabric.integrations.vllm: a KV connector of vLLM that pushes the KvCache from prefill to decode engines.

    --kv-transfer-config '{"kv_connector": "Connector", "kv_connector_module_path": "asyncfabric.integrations.vllm",
                           "kv_role": "kv_producer"}'

and `kv_consumer` at the engines that decode. Written for vLLM 0.26.0 and 0.33.0, which has to be installed.
"""

from asyncfabric.integrations.vllm.connector import Connector

__all__ = ["Connector"]
