"""What the model classes of transformers 5.23.0 tie; data, written by a program.

Written by `fixtures/generators/tied_names.py`; not edited by hand. Pairs are target -> source; a
`*` stands for one segment of a name.
"""

# ruff: noqa: E501, SIM905 - names are as long as they are, and split strings stay readable

from __future__ import annotations

# What a class that is not listed below ties; a later line wins.
HEADS = (
    ("lm_head.weight", "model.decoder.embed_tokens.weight"),
    ("lm_head.weight", "model.text_model.embed_tokens.weight"),
    ("lm_head.weight", "model.language_model.embed_tokens.weight"),
    ("lm_head.weight", "transformer.word_embeddings.weight"),
    ("lm_head.weight", "transformer.wte.weight"),
    ("lm_head.weight", "shared.weight"),
    ("lm_head.weight", "model.shared.weight"),
    ("lm_head.weight", "model.embed_tokens.weight"),
)
# Model types tied where no flag is given.
TIED_BY_DEFAULT = frozenset(
    "albert aya_vision bart bert bert-generation big_bird bigbird_pegasus biogpt blenderbot "
    "blenderbot-small blip blip_text_model bloom camembert canary cohere cohere2 cohere2_moe "
    "cohere2_vision cohere_compass_text convbert cpmant ctrl d_fine dab-detr data2vec-text "
    "deberta deberta-v2 deepseek_vl deepseek_vl_hybrid deformable_detr deimv2 diffusion_gemma "
    "diffusion_gemma_text distilbert electra ernie ernie4_5 ernie4_5_moe ernie4_5_vl_moe "
    "ernie4_5_vl_moe_text esm falcon falcon_mamba flaubert flava florence2 fnet funnel gemma "
    "gemma2 gemma3 gemma3_text gemma3n gemma3n_text gemma4 gemma4_text gemma4_unified "
    "gemma4_unified_assistant gemma4_unified_text glmasr got_ocr2 gpt-sw3 gpt2 gpt_bigcode "
    "gpt_neo gpt_neox_japanese granite_docling granite_docling_text granite_speech "
    "granite_speech5_ctc granite_speech_plus granite_swa grounding-dino gte hunyuan_vl_text "
    "hyperclovax_vision_v2 ibert internvl janus jetmoe jina_embeddings_v3 kimi_k25 kosmos-2 "
    "kosmos-2.5 kosmos_2_5_text_model kosmos_2_text_model layoutlm led lfm2 lfm2_moe lfm2_vl "
    "lfm3 lfm3_vl lighton_ocr longformer luke lxmert m2m_100 mamba marian mbart megatron-bert "
    "mimi mimi_decoder mimi_encoder minicpm3 minicpm_ocr mistral3 mm-grounding-dino "
    "mobilebert modernbert modernbert-decoder moonshine moss_transcribe_diarize mpnet mpt mra "
    "mvp neomme nllb-moe nomic_bert nystromformer openai-gpt opt ovis2 paddleocr_vl_text "
    "paligemma pe_audio_video pegasus pegasus_x plbart pp_chart2table pp_doclayout_v3 "
    "pp_doclayout_v4 prophetnet qwen2_5_omni_text qwen3_asr qwen3_vl_moe_text recurrent_gemma "
    "roberta roberta-prelayernorm roc_bert roformer rt_detr_v2 sam sam_hq seamless_m4t "
    "seamless_m4t_v2 smollm3 speech_to_text speecht5 squeezebert starcoder2 "
    "switch_transformers t5_gemma_module t5gemma t5gemma2 t5gemma2_decoder t5gemma2_encoder "
    "t5gemma2_text tapas trocr vaultgemma visual_bert voxtral_realtime whisper xglm xlm "
    "xlm-roberta xlm-roberta-xl xlnet xmod yoso youtu zamba zamba2 zaya".split()
)
# Tied by their own flag or `text_config`'s.
TIED_OR_TEXT = frozenset(
    "fast_vlm glm4v glm4v_moe glm_ocr hunyuan_vl llava llava_next_video llava_onevision "
    "minimax_m3_vl paddleocr_vl qwen2_5_vl qwen2_vl shieldgemma2 video_llama_3".split()
)
# Tied by that of `text_config` alone.
TIED_AS_TEXT = frozenset("vibevoice".split())
# Tied whatever the flag says.
ALWAYS_TIED = frozenset("longt5 mt5 pop2piano t5 udop umt5 vilt".split())
# Tied by a flag of another name, which is set unless it is given.
OTHER_FLAG = {"csm": "tie_codebooks_embeddings"}
# The flag also scales the head's input.
FLAG_SCALES_OUTPUTS = frozenset("switch_transformers".split())
# By class, what the flag of the root ties.
BY_ROOT: dict[str, dict[str, str]] = {
    "AlbertForMaskedLM AlbertForPreTraining": {
        "predictions.decoder.bias": "predictions.bias",
        "predictions.decoder.weight": "*.embeddings.word_embeddings.weight",
    },
    "AudioFlamingo3ForConditionalGeneration BailingHybridForCausalLM BarkModel "
    "BigBirdPegasusForCausalLM Blip2ForConditionalGeneration Blip2Model "
    "Cosmos3EdgeForConditionalGeneration EncoderDecoderModel EvollaForProteinText2Text "
    "Florence2Model GlmImageForConditionalGeneration Inkling2ForCausalLM "
    "Inkling2ForConditionalGeneration InklingForCausalLM InklingForConditionalGeneration "
    "InstructBlipForConditionalGeneration InstructBlipVideoForConditionalGeneration "
    "KimiLinearForCausalLM Kosmos2_5ForConditionalGeneration Llama4ForConditionalGeneration "
    "MllamaForCausalLM MllamaForConditionalGeneration Molmo2ForConditionalGeneration "
    "MoshiForCausalLM MuseSparkForConditionalGeneration MusicFlamingoForConditionalGeneration "
    "MusicgenForConditionalGeneration MusicgenMelodyForConditionalGeneration "
    "PPFormulaNetForConditionalGeneration Qwen2AudioForConditionalGeneration "
    "Qwen2_5OmniForConditionalGeneration Qwen3OmniMoeForConditionalGeneration RagModel "
    "RagSequenceForGeneration RagTokenForGeneration SpeechEncoderDecoderModel "
    "VibeVoiceAsrForConditionalGeneration VisionEncoderDecoderModel "
    "VoxtralForConditionalGeneration": {},
    "BarkFineModel": {
        "lm_heads.0.weight": "input_embeds_layers.1.weight",
        "lm_heads.1.weight": "input_embeds_layers.2.weight",
        "lm_heads.2.weight": "input_embeds_layers.3.weight",
        "lm_heads.3.weight": "input_embeds_layers.4.weight",
        "lm_heads.4.weight": "input_embeds_layers.5.weight",
        "lm_heads.5.weight": "input_embeds_layers.6.weight",
        "lm_heads.6.weight": "input_embeds_layers.7.weight",
    },
    "BartForConditionalGeneration BigBirdPegasusForConditionalGeneration "
    "BlenderbotForConditionalGeneration BlenderbotSmallForConditionalGeneration "
    "M2M100ForConditionalGeneration MBartForConditionalGeneration MarianMTModel "
    "MvpForConditionalGeneration NllbMoeForConditionalGeneration "
    "PLBartForConditionalGeneration PegasusForConditionalGeneration "
    "PegasusXForConditionalGeneration": {
        "lm_head.weight": "model.shared.weight",
        "model.decoder.embed_tokens.weight": "model.shared.weight",
        "model.encoder.embed_tokens.weight": "model.shared.weight",
    },
    "BartForQuestionAnswering BartForSequenceClassification "
    "BigBirdPegasusForQuestionAnswering BigBirdPegasusForSequenceClassification "
    "MBartForQuestionAnswering MBartForSequenceClassification MvpForQuestionAnswering "
    "MvpForSequenceClassification PLBartForSequenceClassification": {
        "model.decoder.embed_tokens.weight": "model.shared.weight",
        "model.encoder.embed_tokens.weight": "model.shared.weight",
    },
    "BartModel BigBirdPegasusModel BlenderbotModel BlenderbotSmallModel LEDModel LongT5Model "
    "M2M100Model MBartModel MT5ForQuestionAnswering MT5Model MarianModel MvpModel "
    "NllbMoeModel PLBartModel PegasusModel PegasusXModel Pop2PianoForConditionalGeneration "
    "SwitchTransformersModel T5ForQuestionAnswering T5Model UMT5ForQuestionAnswering "
    "UMT5Model": {
        "decoder.embed_tokens.weight": "shared.weight",
        "encoder.embed_tokens.weight": "shared.weight",
    },
    "BertForMaskedLM BertForPreTraining BertLMHeadModel BigBirdForCausalLM BigBirdForMaskedLM "
    "BigBirdForPreTraining BlipTextLMHeadModel DebertaForMaskedLM DebertaV2ForMaskedLM "
    "ErnieForCausalLM ErnieForMaskedLM ErnieForPreTraining FNetForMaskedLM FNetForPreTraining "
    "LayoutLMForMaskedLM MegatronBertForCausalLM MegatronBertForMaskedLM "
    "MegatronBertForPreTraining MobileBertForMaskedLM MobileBertForPreTraining MraForMaskedLM "
    "NomicBertForMaskedLM NystromformerForMaskedLM RoCBertForCausalLM RoCBertForMaskedLM "
    "RoCBertForPreTraining RoFormerForCausalLM RoFormerForMaskedLM SqueezeBertForMaskedLM "
    "TapasForMaskedLM VisualBertForPreTraining VisualBertForRegionToPhraseAlignment "
    "YosoForMaskedLM": {
        "cls.predictions.decoder.bias": "cls.predictions.bias",
        "cls.predictions.decoder.weight": "*.embeddings.word_embeddings.weight",
    },
    "BertGenerationDecoder CamembertForCausalLM CamembertForMaskedLM Data2VecTextForCausalLM "
    "Data2VecTextForMaskedLM IBertForMaskedLM JinaEmbeddingsV3ForMaskedLM "
    "LongformerForMaskedLM MPNetForMaskedLM RobertaForCausalLM RobertaForMaskedLM "
    "RobertaPreLayerNormForCausalLM RobertaPreLayerNormForMaskedLM XLMRobertaForCausalLM "
    "XLMRobertaForMaskedLM XLMRobertaXLForCausalLM XLMRobertaXLForMaskedLM XmodForCausalLM "
    "XmodForMaskedLM": {
        "lm_head.decoder.bias": "lm_head.bias",
        "lm_head.decoder.weight": "*.embeddings.word_embeddings.weight",
    },
    "BioGptForCausalLM": {"output_projection.weight": "biogpt.embed_tokens.weight"},
    "BlipForConditionalGeneration BlipForQuestionAnswering": {
        "text_decoder.cls.predictions.decoder.bias": "text_decoder.cls.predictions.bias",
        "text_decoder.cls.predictions.decoder.weight": "text_decoder.bert.embeddings.word_embeddings.weight",
    },
    "BltForCausalLM": {"model.local_encoder.embed_tokens.weight": "lm_head.weight"},
    "BridgeTowerForMaskedLM": {
        "mlm_score.decoder.weight": "bridgetower.text_model.embeddings.word_embeddings.weight"
    },
    "CTRLLMHeadModel": {"lm_head.weight": "transformer.w.weight"},
    "CanaryForConditionalGeneration CohereAsrForConditionalGeneration "
    "MoonshineForConditionalGeneration MoonshineStreamingForConditionalGeneration "
    "WhisperForCausalLM WhisperForConditionalGeneration": {
        "proj_out.weight": "model.decoder.embed_tokens.weight"
    },
    "ConvBertForMaskedLM ElectraForCausalLM ElectraForMaskedLM": {
        "generator_lm_head.weight": "*.embeddings.word_embeddings.weight"
    },
    "CsmForConditionalGeneration": {
        "backbone_model.embed_tokens.embed_audio_tokens.weight": "depth_decoder.model.embed_tokens.weight"
    },
    "DistilBertForMaskedLM": {"vocab_projector.weight": "*.embeddings.word_embeddings.weight"},
    "EsmForMaskedLM GteForMaskedLM": {
        "lm_head.decoder.weight": "*.embeddings.word_embeddings.weight"
    },
    "FSMTForConditionalGeneration": {
        "model.decoder.output_projection.weight": "model.decoder.embed_tokens.weight",
        "model.encoder.embed_tokens.weight": "model.decoder.embed_tokens.weight",
    },
    "FSMTModel": {
        "decoder.output_projection.weight": "decoder.embed_tokens.weight",
        "encoder.embed_tokens.weight": "decoder.embed_tokens.weight",
    },
    "FalconMambaForCausalLM Mamba2ForCausalLM MambaForCausalLM": {
        "lm_head.weight": "backbone.embeddings.weight"
    },
    "FlaubertWithLMHeadModel XLMWithLMHeadModel": {
        "pred_layer.proj.weight": "transformer.embeddings.weight"
    },
    "FlavaForPreTraining": {
        "mim_head.bias": "mim_head.decoder.bias",
        "mlm_head.bias": "mlm_head.decoder.bias",
        "mmm_image_head.bias": "mmm_image_head.decoder.bias",
        "mmm_text_head.bias": "mmm_text_head.decoder.bias",
    },
    "Florence2ForConditionalGeneration": {"lm_head.weight": "model.language_model.shared.weight"},
    "FunnelForMaskedLM": {"lm_head.weight": "*.embeddings.word_embeddings.weight"},
    "GPTNeoXForCausalLM": {"lm_head.weight": "gpt_neox.embed_in.weight"},
    "GPTNeoXJapaneseForCausalLM": {"embed_out.weight": "gpt_neox_japanese.embed_in.weight"},
    "GitForCausalLM": {"output.weight": "*.embeddings.word_embeddings.weight"},
    "GraniteSpeech5ForCTC": {
        "ctc_head.bias": "encoder.out.bias",
        "ctc_head.weight": "encoder.out.weight",
    },
    "Kosmos2ForConditionalGeneration": {
        "text_model.lm_head.weight": "text_model.model.embed_tokens.weight"
    },
    "KyutaiSpeechToTextForConditionalGeneration": {
        "lm_head.weight": "model.embed_tokens.embed_tokens.weight"
    },
    "LEDForConditionalGeneration": {
        "led.decoder.embed_tokens.weight": "led.shared.weight",
        "led.encoder.embed_tokens.weight": "led.shared.weight",
        "lm_head.weight": "led.shared.weight",
    },
    "LEDForQuestionAnswering": {
        "led.decoder.embed_tokens.weight": "led.shared.weight",
        "led.encoder.embed_tokens.weight": "led.shared.weight",
    },
    "LongT5EncoderModel MT5EncoderModel SwitchTransformersEncoderModel T5EncoderModel "
    "UMT5EncoderModel": {"encoder.embed_tokens.weight": "shared.weight"},
    "LongT5ForConditionalGeneration MT5ForConditionalGeneration "
    "SwitchTransformersForConditionalGeneration T5ForConditionalGeneration "
    "UMT5ForConditionalGeneration": {
        "decoder.embed_tokens.weight": "shared.weight",
        "encoder.embed_tokens.weight": "shared.weight",
        "lm_head.weight": "shared.weight",
    },
    "LukeForMaskedLM": {
        "entity_predictions.decoder.weight": "luke.entity_embeddings.entity_embeddings.weight",
        "lm_head.bias": "lm_head.decoder.bias",
    },
    "LxmertForPreTraining": {
        "cls.predictions.decoder.weight": "*.embeddings.word_embeddings.weight"
    },
    "MT5ForSequenceClassification T5ForSequenceClassification UMT5ForSequenceClassification": {
        "transformer.decoder.embed_tokens.weight": "transformer.shared.weight",
        "transformer.encoder.embed_tokens.weight": "transformer.shared.weight",
    },
    "MT5ForTokenClassification T5ForTokenClassification UMT5ForTokenClassification": {
        "transformer.encoder.embed_tokens.weight": "transformer.shared.weight"
    },
    "ModernBertDecoderForCausalLM ModernBertForMaskedLM": {
        "decoder.weight": "model.embeddings.tok_embeddings.weight"
    },
    "ModernVBertForMaskedLM": {
        "lm_head.weight": "model.text_model.embeddings.tok_embeddings.weight"
    },
    "NeoMMEForMaskedLM": {
        "lm_head.weight": "model.embed_tokens.word_embeddings.weight",
        "unembedding_projection.weight": "model.embed_tokens.embedding_projection.weight",
    },
    "OpenAIGPTDoubleHeadsModel": {"transformer.tokens_embed.weight": "lm_head.weight"},
    "OpenAIGPTLMHeadModel": {"lm_head.weight": "transformer.tokens_embed.weight"},
    "ProphetNetForCausalLM": {
        "lm_head.weight": "prophetnet.word_embeddings.weight",
        "prophetnet.decoder.word_embeddings.weight": "prophetnet.word_embeddings.weight",
    },
    "ProphetNetForConditionalGeneration": {
        "lm_head.weight": "prophetnet.word_embeddings.weight",
        "prophetnet.decoder.word_embeddings.weight": "prophetnet.word_embeddings.weight",
        "prophetnet.encoder.word_embeddings.weight": "prophetnet.word_embeddings.weight",
    },
    "ProphetNetModel": {
        "decoder.word_embeddings.weight": "word_embeddings.weight",
        "encoder.word_embeddings.weight": "word_embeddings.weight",
    },
    "Qwen3OmniMoeTalkerCodePredictorModelForConditionalGeneration": {
        "lm_head.weight": "model.embed_tokens.weight"
    },
    "RwkvForCausalLM": {"head.weight": "rwkv.embeddings.weight"},
    "SeamlessM4TForSpeechToSpeech SeamlessM4Tv2ForSpeechToSpeech": {
        "lm_head.weight": "shared.weight",
        "t2u_model.lm_head.weight": "t2u_model.model.decoder.embed_tokens.weight",
        "text_decoder.embed_tokens.weight": "shared.weight",
    },
    "SeamlessM4TForSpeechToText SeamlessM4Tv2ForSpeechToText": {
        "lm_head.weight": "shared.weight",
        "text_decoder.embed_tokens.weight": "shared.weight",
    },
    "SeamlessM4TForTextToSpeech SeamlessM4TModel SeamlessM4Tv2ForTextToSpeech SeamlessM4Tv2Model": {
        "lm_head.weight": "shared.weight",
        "t2u_model.lm_head.weight": "t2u_model.model.decoder.embed_tokens.weight",
        "text_decoder.embed_tokens.weight": "shared.weight",
        "text_encoder.embed_tokens.weight": "shared.weight",
    },
    "SeamlessM4TForTextToText SeamlessM4Tv2ForTextToText": {
        "lm_head.weight": "shared.weight",
        "text_decoder.embed_tokens.weight": "shared.weight",
        "text_encoder.embed_tokens.weight": "shared.weight",
    },
    "ShieldGemma2ForImageClassification": {
        "model.lm_head.weight": "model.model.language_model.embed_tokens.weight"
    },
    "SpeechT5ForSpeechToText": {
        "text_decoder_postnet.lm_head.weight": "speecht5.decoder.prenet.embed_tokens.weight"
    },
    "T5Gemma2ForConditionalGeneration": {
        "lm_head.out_proj.weight": "model.encoder.text_model.embed_tokens.weight",
        "model.decoder.embed_tokens.eoi_embedding": "model.encoder.text_model.embed_tokens.eoi_embedding",
        "model.decoder.embed_tokens.weight": "model.encoder.text_model.embed_tokens.weight",
    },
    "T5Gemma2ForSequenceClassification T5Gemma2ForTokenClassification": {
        "model.decoder.embed_tokens.eoi_embedding": "model.encoder.text_model.embed_tokens.eoi_embedding",
        "model.decoder.embed_tokens.weight": "model.encoder.text_model.embed_tokens.weight",
    },
    "T5Gemma2Model": {
        "decoder.embed_tokens.eoi_embedding": "encoder.text_model.embed_tokens.eoi_embedding",
        "decoder.embed_tokens.weight": "encoder.text_model.embed_tokens.weight",
    },
    "T5GemmaForConditionalGeneration": {
        "lm_head.out_proj.weight": "model.decoder.embed_tokens.weight"
    },
    "TrOCRForCausalLM": {"output_projection.weight": "model.decoder.embed_tokens.weight"},
    "UdopEncoderModel": {
        "encoder.embed_patches.proj.bias": "patch_embed.proj.bias",
        "encoder.embed_patches.proj.weight": "patch_embed.proj.weight",
        "encoder.embed_tokens.weight": "shared.weight",
        "encoder.relative_bias.biases.0.relative_attention_bias.weight": "encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight",
    },
    "UdopForConditionalGeneration": {
        "decoder.embed_tokens.weight": "shared.weight",
        "decoder.relative_bias.biases.0.relative_attention_bias.weight": "encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight",
        "encoder.embed_patches.proj.bias": "patch_embed.proj.bias",
        "encoder.embed_patches.proj.weight": "patch_embed.proj.weight",
        "encoder.embed_tokens.weight": "shared.weight",
        "encoder.relative_bias.biases.0.relative_attention_bias.weight": "encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight",
        "lm_head.weight": "shared.weight",
    },
    "UdopModel": {
        "decoder.embed_tokens.weight": "shared.weight",
        "encoder.embed_patches.proj.bias": "patch_embed.proj.bias",
        "encoder.embed_patches.proj.weight": "patch_embed.proj.weight",
        "encoder.embed_tokens.weight": "shared.weight",
    },
    "UltrabertForMaskedLM": {"head.decoder.weight": "model.embed_tokens.weight"},
    "ViltForMaskedLM": {
        "mlm_score.decoder.weight": "vilt.embeddings.text_embeddings.word_embeddings.weight"
    },
    "XLNetLMHeadModel": {"lm_loss.weight": "transformer.word_embedding.weight"},
}
# By path and model type of a configuration inside, and class, what its flag ties.
BY_NESTED: dict[tuple[str, str], dict[str, dict[str, str]]] = {
    ("decoder", "bert"): {
        "EncoderDecoderModel SpeechEncoderDecoderModel VisionEncoderDecoderModel": {
            "decoder.cls.predictions.decoder.bias": "decoder.cls.predictions.bias",
            "decoder.cls.predictions.decoder.weight": "decoder.bert.embeddings.word_embeddings.weight",
        },
    },
    ("fine_acoustics_config", "fine_acoustics"): {
        "BarkModel": {
            "fine_acoustics.lm_heads.0.weight": "fine_acoustics.input_embeds_layers.1.weight",
            "fine_acoustics.lm_heads.1.weight": "fine_acoustics.input_embeds_layers.2.weight",
            "fine_acoustics.lm_heads.2.weight": "fine_acoustics.input_embeds_layers.3.weight",
            "fine_acoustics.lm_heads.3.weight": "fine_acoustics.input_embeds_layers.4.weight",
            "fine_acoustics.lm_heads.4.weight": "fine_acoustics.input_embeds_layers.5.weight",
            "fine_acoustics.lm_heads.5.weight": "fine_acoustics.input_embeds_layers.6.weight",
            "fine_acoustics.lm_heads.6.weight": "fine_acoustics.input_embeds_layers.7.weight",
        },
    },
    ("generator", "bart"): {
        "RagModel": {
            "generator.lm_head.weight": "generator.model.shared.weight",
            "generator.model.decoder.embed_tokens.weight": "generator.model.shared.weight",
            "generator.model.encoder.embed_tokens.weight": "generator.model.shared.weight",
        },
        "RagSequenceForGeneration RagTokenForGeneration": {
            "rag.generator.lm_head.weight": "rag.generator.model.shared.weight",
            "rag.generator.model.decoder.embed_tokens.weight": "rag.generator.model.shared.weight",
            "rag.generator.model.encoder.embed_tokens.weight": "rag.generator.model.shared.weight",
        },
    },
    ("talker_config.code_predictor_config", "qwen3_omni_moe_talker_code_predictor"): {
        "Qwen3OmniMoeForConditionalGeneration": {
            "talker.code_predictor.lm_head.weight": "talker.code_predictor.model.embed_tokens.weight"
        },
    },
    ("text_config", "bart"): {
        "Florence2ForConditionalGeneration": {
            "model.language_model.decoder.embed_tokens.weight": "model.language_model.shared.weight",
            "model.language_model.encoder.embed_tokens.weight": "model.language_model.shared.weight",
        },
        "Florence2Model": {
            "language_model.decoder.embed_tokens.weight": "language_model.shared.weight",
            "language_model.encoder.embed_tokens.weight": "language_model.shared.weight",
        },
    },
    ("text_config", "blip_text_model"): {
        "BlipForConditionalGeneration BlipForQuestionAnswering": {
            "text_decoder.cls.predictions.decoder.bias": "text_decoder.cls.predictions.bias",
            "text_decoder.cls.predictions.decoder.weight": "text_decoder.bert.embeddings.word_embeddings.weight",
        },
    },
    ("text_config", "kosmos_2_5_text_model"): {
        "Kosmos2_5ForConditionalGeneration": {
            "text_model.lm_head.weight": "text_model.model.embed_tokens.weight"
        },
    },
    ("text_config", "kosmos_2_text_model"): {
        "Kosmos2ForConditionalGeneration": {
            "text_model.lm_head.weight": "text_model.model.embed_tokens.weight"
        },
    },
    ("text_config", "llama4_text"): {
        "Llama4ForConditionalGeneration": {
            "language_model.lm_head.weight": "language_model.model.embed_tokens.weight"
        },
    },
    ("text_config", "opt"): {
        "Blip2ForConditionalGeneration Blip2Model InstructBlipForConditionalGeneration "
        "InstructBlipVideoForConditionalGeneration": {
            "language_model.lm_head.weight": "language_model.model.decoder.embed_tokens.weight"
        },
    },
    ("text_encoder", "t5"): {
        "MusicgenForConditionalGeneration MusicgenMelodyForConditionalGeneration": {
            "text_encoder.encoder.embed_tokens.weight": "text_encoder.shared.weight"
        },
    },
    ("thinker_config", "qwen2_5_omni_thinker"): {
        "Qwen2_5OmniForConditionalGeneration": {
            "thinker.lm_head.weight": "thinker.model.language_model.embed_tokens.weight"
        },
    },
    ("thinker_config", "qwen3_omni_moe_thinker"): {
        "Qwen3OmniMoeForConditionalGeneration": {
            "thinker.lm_head.weight": "thinker.model.language_model.embed_tokens.weight"
        },
    },
}
# By class, in order: prefix of a module, pattern of targets in it, pattern of their
# sources, the field that decides it if any, and the value that the field has by default.
PATTERNS: dict[str, tuple[tuple[str, str, str, str, bool], ...]] = {
    "DFineForObjectDetection": (
        ("", "bbox_embed.(?![0])\\d+", "bbox_embed.0", "", True),
        ("", "class_embed.(?![0])\\d+", "^class_embed.0", "", True),
        ("", "class_embed", "model.decoder.class_embed", "", True),
        ("", "bbox_embed", "model.decoder.bbox_embed", "", True),
    ),
    "DabDetrForObjectDetection": (("", "model.decoder.bbox_embed", "bbox_predictor", "", True),),
    "DeformableDetrForObjectDetection": (
        ("", "bbox_embed.(?![0])\\d+", "bbox_embed.0", "", True),
        ("", "class_embed.(?![0])\\d+", "class_embed.0", "", True),
        ("", "bbox_embed", "model.decoder.bbox_embed", "with_box_refine", False),
        ("", "class_embed", "model.decoder.class_embed", "two_stage", False),
    ),
    "Deimv2ForObjectDetection": (
        ("", "class_embed.(?![0])\\d+", "^class_embed.0", "", True),
        ("", "class_embed", "model.decoder.class_embed", "", True),
        ("", "bbox_embed", "model.decoder.bbox_embed", "", True),
    ),
    "DiffusionGemmaForBlockDiffusion": (
        ("model.", "encoder.language_model.norm.weight", "decoder.norm.weight", "", True),
        (
            "model.",
            "encoder.language_model.layers\\.(?:[^.]+\\.)*weight",
            "decoder.layers\\.(?:[^.]+\\.)*weight",
            "",
            True,
        ),
        (
            "model.",
            "encoder.language_model.layers\\.(?:[^.]+\\.)*scale",
            "decoder.layers\\.(?:[^.]+\\.)*scale",
            "",
            True,
        ),
        (
            "model.",
            "encoder.language_model.layers\\.(?:[^.]+\\.)*per_expert_scale",
            "decoder.layers\\.(?:[^.]+\\.)*per_expert_scale",
            "",
            True,
        ),
        (
            "model.",
            "encoder.language_model.layers\\.(?:[^.]+\\.)*gate_up_proj",
            "decoder.layers\\.(?:[^.]+\\.)*gate_up_proj",
            "",
            True,
        ),
        (
            "model.",
            "encoder.language_model.layers\\.(?:[^.]+\\.)*down_proj",
            "decoder.layers\\.(?:[^.]+\\.)*down_proj",
            "",
            True,
        ),
        (
            "model.",
            "encoder.language_model.embed_tokens.weight",
            "decoder.embed_tokens.weight",
            "",
            True,
        ),
    ),
    "DiffusionGemmaModel": (
        ("", "encoder.language_model.norm.weight", "decoder.norm.weight", "", True),
        (
            "",
            "encoder.language_model.layers\\.(?:[^.]+\\.)*weight",
            "decoder.layers\\.(?:[^.]+\\.)*weight",
            "",
            True,
        ),
        (
            "",
            "encoder.language_model.layers\\.(?:[^.]+\\.)*scale",
            "decoder.layers\\.(?:[^.]+\\.)*scale",
            "",
            True,
        ),
        (
            "",
            "encoder.language_model.layers\\.(?:[^.]+\\.)*per_expert_scale",
            "decoder.layers\\.(?:[^.]+\\.)*per_expert_scale",
            "",
            True,
        ),
        (
            "",
            "encoder.language_model.layers\\.(?:[^.]+\\.)*gate_up_proj",
            "decoder.layers\\.(?:[^.]+\\.)*gate_up_proj",
            "",
            True,
        ),
        (
            "",
            "encoder.language_model.layers\\.(?:[^.]+\\.)*down_proj",
            "decoder.layers\\.(?:[^.]+\\.)*down_proj",
            "",
            True,
        ),
        ("", "encoder.language_model.embed_tokens.weight", "decoder.embed_tokens.weight", "", True),
    ),
    "GroundingDinoForObjectDetection": (
        ("", "bbox_embed.(?![0])\\d+", "bbox_embed.0", "decoder_bbox_embed_share", True),
        ("", "model.decoder.bbox_embed", "bbox_embed", "", True),
    ),
    "MMGroundingDinoForObjectDetection": (
        ("", "bbox_embed.(?![0])\\d+", "bbox_embed.0", "decoder_bbox_embed_share", True),
        ("", "class_embed.(?![0])\\d+", "^class_embed.0", "decoder_cls_embed_share", True),
        ("", "model.decoder.bbox_embed", "bbox_embed", "", True),
        ("", "model.decoder.class_embed", "class_embed", "", True),
    ),
    "PPDocLayoutV3ForObjectDetection": (
        ("model.", "decoder.class_embed", "enc_score_head", "", True),
        ("model.", "decoder.bbox_embed", "enc_bbox_head", "", True),
    ),
    "PPDocLayoutV3Model": (
        ("", "decoder.class_embed", "enc_score_head", "", True),
        ("", "decoder.bbox_embed", "enc_bbox_head", "", True),
    ),
    "RTDetrV2ForObjectDetection": (
        ("", "bbox_embed.(?![0])\\d+", "bbox_embed.0", "", True),
        ("", "class_embed.(?![0])\\d+", "^class_embed.0", "", True),
        ("", "class_embed", "model.decoder.class_embed", "", True),
        ("", "bbox_embed", "model.decoder.bbox_embed", "", True),
    ),
    "SamHQModel": (
        (
            "",
            "prompt_encoder.shared_embedding.positional_embedding",
            "shared_image_embedding.positional_embedding",
            "",
            True,
        ),
    ),
    "SamModel": (
        (
            "",
            "prompt_encoder.shared_embedding.positional_embedding",
            "shared_image_embedding.positional_embedding",
            "",
            True,
        ),
    ),
}
