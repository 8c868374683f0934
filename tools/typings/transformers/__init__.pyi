"""The names of transformers that this repository uses, each from the module that defines it.

The type checker reads this instead of transformers' own `__init__`, which imports all 500 architectures where types are
checked: 20 seconds of processor time. A name that is missing here is an error where it is used; add it.
"""

from transformers.cache_utils import DynamicCache as DynamicCache
from transformers.cache_utils import StaticCache as StaticCache
from transformers.configuration_utils import PreTrainedConfig as PreTrainedConfig
from transformers.generation.configuration_utils import ContinuousBatchingConfig as ContinuousBatchingConfig
from transformers.generation.configuration_utils import GenerationConfig as GenerationConfig
from transformers.generation.logits_process import LogitsProcessor as LogitsProcessor
from transformers.generation.logits_process import LogitsProcessorList as LogitsProcessorList
from transformers.generation.stopping_criteria import StoppingCriteriaList as StoppingCriteriaList
from transformers.masking_utils import AttentionMaskInterface as AttentionMaskInterface
from transformers.modeling_utils import AttentionInterface as AttentionInterface
from transformers.modeling_utils import PreTrainedModel as PreTrainedModel
from transformers.models.auto.configuration_auto import AutoConfig as AutoConfig
from transformers.models.auto.modeling_auto import AutoModel as AutoModel
from transformers.models.auto.modeling_auto import AutoModelForCausalLM as AutoModelForCausalLM
from transformers.models.auto.modeling_auto import AutoModelForSeq2SeqLM as AutoModelForSeq2SeqLM
from transformers.models.auto.tokenization_auto import AutoTokenizer as AutoTokenizer
from transformers.models.bart.configuration_bart import BartConfig as BartConfig
from transformers.models.bart.modeling_bart import BartForConditionalGeneration as BartForConditionalGeneration
from transformers.models.bert.configuration_bert import BertConfig as BertConfig
from transformers.models.bert.modeling_bert import BertLMHeadModel as BertLMHeadModel
from transformers.models.bigbird_pegasus.configuration_bigbird_pegasus import (
    BigBirdPegasusConfig as BigBirdPegasusConfig,
)
from transformers.models.bigbird_pegasus.modeling_bigbird_pegasus import BigBirdPegasusModel as BigBirdPegasusModel
from transformers.models.clip.configuration_clip import CLIPVisionConfig as CLIPVisionConfig
from transformers.models.deepseek_v3.configuration_deepseek_v3 import DeepseekV3Config as DeepseekV3Config
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3ForCausalLM as DeepseekV3ForCausalLM
from transformers.models.deepseek_v4.configuration_deepseek_v4 import DeepseekV4Config as DeepseekV4Config
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4ForCausalLM as DeepseekV4ForCausalLM
from transformers.models.falcon.configuration_falcon import FalconConfig as FalconConfig
from transformers.models.falcon.modeling_falcon import FalconForCausalLM as FalconForCausalLM
from transformers.models.git.configuration_git import GitConfig as GitConfig
from transformers.models.git.modeling_git import GitForCausalLM as GitForCausalLM
from transformers.models.glm4_moe.configuration_glm4_moe import Glm4MoeConfig as Glm4MoeConfig
from transformers.models.gpt2.configuration_gpt2 import GPT2Config as GPT2Config
from transformers.models.gpt2.modeling_gpt2 import GPT2LMHeadModel as GPT2LMHeadModel
from transformers.models.gpt_oss.configuration_gpt_oss import GptOssConfig as GptOssConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssForCausalLM as GptOssForCausalLM
from transformers.models.llama.configuration_llama import LlamaConfig as LlamaConfig
from transformers.models.llama.modeling_llama import LlamaForCausalLM as LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaModel as LlamaModel
from transformers.models.llama4.configuration_llama4 import Llama4TextConfig as Llama4TextConfig
from transformers.models.llama4.modeling_llama4 import Llama4ForCausalLM as Llama4ForCausalLM
from transformers.models.llava.configuration_llava import LlavaConfig as LlavaConfig
from transformers.models.llava.modeling_llava import LlavaForConditionalGeneration as LlavaForConditionalGeneration
from transformers.models.mamba.configuration_mamba import MambaConfig as MambaConfig
from transformers.models.mamba.modeling_mamba import MambaForCausalLM as MambaForCausalLM
from transformers.models.mamba2.configuration_mamba2 import Mamba2Config as Mamba2Config
from transformers.models.mamba2.modeling_mamba2 import Mamba2ForCausalLM as Mamba2ForCausalLM
from transformers.models.minimax_m2.configuration_minimax_m2 import MiniMaxM2Config as MiniMaxM2Config
from transformers.models.minimax_m2.modeling_minimax_m2 import MiniMaxM2ForCausalLM as MiniMaxM2ForCausalLM
from transformers.models.mixtral.configuration_mixtral import MixtralConfig as MixtralConfig
from transformers.models.mixtral.modeling_mixtral import MixtralForCausalLM as MixtralForCausalLM
from transformers.models.nanochat.configuration_nanochat import NanoChatConfig as NanoChatConfig
from transformers.models.nanochat.modeling_nanochat import NanoChatForCausalLM as NanoChatForCausalLM
from transformers.models.nemotron_h.configuration_nemotron_h import NemotronHConfig as NemotronHConfig
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHForCausalLM as NemotronHForCausalLM
from transformers.models.nomic_bert.configuration_nomic_bert import NomicBertConfig as NomicBertConfig
from transformers.models.nomic_bert.modeling_nomic_bert import NomicBertForMaskedLM as NomicBertForMaskedLM
from transformers.models.olmoe.configuration_olmoe import OlmoeConfig as OlmoeConfig
from transformers.models.qwen2_vl.configuration_qwen2_vl import Qwen2VLConfig as Qwen2VLConfig
from transformers.models.qwen2_vl.modeling_qwen2_vl import (
    Qwen2VLForConditionalGeneration as Qwen2VLForConditionalGeneration,
)
from transformers.models.qwen3_moe.configuration_qwen3_moe import Qwen3MoeConfig as Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeForCausalLM as Qwen3MoeForCausalLM
from transformers.models.qwen3_vl_moe.configuration_qwen3_vl_moe import Qwen3VLMoeConfig as Qwen3VLMoeConfig
from transformers.models.qwen3_vl_moe.modeling_qwen3_vl_moe import (
    Qwen3VLMoeForConditionalGeneration as Qwen3VLMoeForConditionalGeneration,
)
from transformers.models.recurrent_gemma.configuration_recurrent_gemma import (
    RecurrentGemmaConfig as RecurrentGemmaConfig,
)
from transformers.models.recurrent_gemma.modeling_recurrent_gemma import (
    RecurrentGemmaForCausalLM as RecurrentGemmaForCausalLM,
)
from transformers.models.siglip.configuration_siglip import SiglipVisionConfig as SiglipVisionConfig
from transformers.models.siglip.modeling_siglip import SiglipVisionModel as SiglipVisionModel
from transformers.models.t5.configuration_t5 import T5Config as T5Config
from transformers.models.t5.modeling_t5 import T5ForConditionalGeneration as T5ForConditionalGeneration
from transformers.models.wav2vec2.configuration_wav2vec2 import Wav2Vec2Config as Wav2Vec2Config
from transformers.models.wav2vec2.modeling_wav2vec2 import Wav2Vec2Model as Wav2Vec2Model
from transformers.tokenization_utils_tokenizers import PreTrainedTokenizerFast as PreTrainedTokenizerFast
from transformers.utils import logging as logging

__version__: str
