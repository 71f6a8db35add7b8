"""The names of transformers that this package, trl and peft use, in the modules that define them.

The package's own `__init__` imports everything from two thousand modules: a third of `make types` went into reading
them. A name that is missing here is an error of `make types`; `tests/test_house.py` compares each with that of the
package.
"""

from transformers.cache_utils import Cache as Cache
from transformers.cache_utils import DynamicCache as DynamicCache
from transformers.configuration_utils import PretrainedConfig as PretrainedConfig
from transformers.feature_extraction_utils import FeatureExtractionMixin as FeatureExtractionMixin
from transformers.generation.configuration_utils import GenerationConfig as GenerationConfig
from transformers.generation.utils import GenerationMixin as GenerationMixin
from transformers.image_processing_utils import BaseImageProcessor as BaseImageProcessor
from transformers.modeling_utils import PreTrainedModel as PreTrainedModel
from transformers.models.auto.configuration_auto import AutoConfig as AutoConfig
from transformers.models.auto.image_processing_auto import AutoImageProcessor as AutoImageProcessor
from transformers.models.auto.modeling_auto import AutoModel as AutoModel
from transformers.models.auto.modeling_auto import AutoModelForCausalLM as AutoModelForCausalLM
from transformers.models.auto.modeling_auto import AutoModelForImageTextToText as AutoModelForImageTextToText
from transformers.models.auto.processing_auto import AutoProcessor as AutoProcessor
from transformers.models.auto.tokenization_auto import AutoTokenizer as AutoTokenizer
from transformers.models.byt5.tokenization_byt5 import ByT5Tokenizer as ByT5Tokenizer
from transformers.models.clip.configuration_clip import CLIPConfig as CLIPConfig
from transformers.models.clip.configuration_clip import CLIPTextConfig as CLIPTextConfig
from transformers.models.clip.modeling_clip import CLIPModel as CLIPModel
from transformers.models.clip.modeling_clip import CLIPTextModel as CLIPTextModel
from transformers.models.clip.modeling_clip import CLIPTextModelWithProjection as CLIPTextModelWithProjection
from transformers.models.clip.modeling_clip import CLIPVisionModelWithProjection as CLIPVisionModelWithProjection
from transformers.models.clip.tokenization_clip import CLIPTokenizer as CLIPTokenizer
from transformers.models.mask2former.image_processing_pil_mask2former import (
    Mask2FormerImageProcessorPil as Mask2FormerImageProcessorPil,
)
from transformers.models.mask2former.modeling_mask2former import (
    Mask2FormerForUniversalSegmentation as Mask2FormerForUniversalSegmentation,
)
from transformers.models.mistral3.configuration_mistral3 import Mistral3Config as Mistral3Config
from transformers.models.mistral3.modeling_mistral3 import (
    Mistral3ForConditionalGeneration as Mistral3ForConditionalGeneration,
)
from transformers.models.qwen2.tokenization_qwen2 import Qwen2Tokenizer as Qwen2Tokenizer
from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import Qwen2_5_VLConfig as Qwen2_5_VLConfig
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import (
    Qwen2_5_VLForConditionalGeneration as Qwen2_5_VLForConditionalGeneration,
)
from transformers.models.qwen2_5_vl.processing_qwen2_5_vl import Qwen2_5_VLProcessor as Qwen2_5_VLProcessor
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import (
    Qwen2VLImageProcessorPil as Qwen2VLImageProcessorPil,
)
from transformers.models.qwen3.configuration_qwen3 import Qwen3Config as Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3ForCausalLM as Qwen3ForCausalLM
from transformers.models.qwen3.modeling_qwen3 import Qwen3Model as Qwen3Model
from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLConfig as Qwen3VLConfig
from transformers.models.qwen3_vl.modeling_qwen3_vl import (
    Qwen3VLForConditionalGeneration as Qwen3VLForConditionalGeneration,
)
from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor as Qwen3VLProcessor
from transformers.models.sam2.modeling_sam2 import Sam2Model as Sam2Model
from transformers.models.siglip.configuration_siglip import SiglipVisionConfig as SiglipVisionConfig
from transformers.models.siglip.modeling_siglip import SiglipVisionModel as SiglipVisionModel
from transformers.models.t5.configuration_t5 import T5Config as T5Config
from transformers.models.t5.modeling_t5 import T5EncoderModel as T5EncoderModel
from transformers.processing_utils import ProcessorMixin as ProcessorMixin
from transformers.tokenization_utils_base import PreTrainedTokenizerBase as PreTrainedTokenizerBase
from transformers.tokenization_utils_tokenizers import PreTrainedTokenizerFast as PreTrainedTokenizerFast
from transformers.trainer import Trainer as Trainer
from transformers.trainer_callback import TrainerCallback as TrainerCallback
from transformers.trainer_callback import TrainerControl as TrainerControl
from transformers.trainer_callback import TrainerState as TrainerState
from transformers.training_args import TrainingArguments as TrainingArguments
from transformers.utils.quantization_config import BitsAndBytesConfig as BitsAndBytesConfig
