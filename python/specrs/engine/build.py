"""From an EngineConfig to loaded models, caches and limits. Runs nothing and schedules nothing."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from specrs.config import EngineConfig
from specrs.drafters.draft_model import DraftModel
from specrs.errors import invalid_config
from specrs.models.config import ModelConfig
from specrs.models.decoder import Decoder
from specrs.models.kv_cache import KVCache
from specrs.models.loader import load_config, load_model
from specrs.sampling import RequestLimits
