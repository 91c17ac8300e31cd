# Made by tests/python/stub.py from `ddp-train settings`; launch/test checks that it is up to date.

import os
from collections.abc import Mapping, Sequence
from typing import Literal, Optional, TypedDict, Union

Value = Union[str, float, os.PathLike[str], Sequence[Union[str, float]], Mapping[str, float], None]

class Settings(TypedDict, total=False):
    model: Value
    """Model family or preset; settings may follow, as in gpt,layers=6,width=384. mlp: A multilayer
    perceptron; gpt: A transformer that learns the next token, like GPT-2 (presets: gpt-tiny,
    gpt2, gpt2-medium, gpt2-large, gpt2-xl, llama-tiny); vit: A transformer over the patches of
    images [default: mlp]"""
    freeze: Value
    """Names or patterns of layers or parameters that are not trained, separated by commas, as in
    0,2.bias or 'blocks.?,*.bias' [default: none; of small tables all but a linear model, if
    that suffices]"""
    lora: Value
    """Train adapters of low rank (LoRA) beside the weights of --init-from, which stay as they are:
    rank=16,alpha=32,on=all-linear; on may be names or patterns of layers, as in
    on=q_proj,v_proj; dropout=P and rslora=true may follow. Or from=FOLDER: those that PEFT or
    export wrote"""
    plain: Optional[bool]
    """Keep the defaults of version 0.8, in which tables choose nothing [default: false]"""
    val_split: Value
    """Fraction of the rows of --data, chosen by --seed, to keep for evaluation (of tokens: the last
    ones); an alternative to --val-data [default: 0; of tables with more than 5,000 rows 0.2, at
    most 10,000 rows]"""
    stratify: Optional[bool]
    """Whether --val-split keeps the same fraction of each class [default: where tables choose it]"""
    task: Optional[Literal["classification", "regression"]]
    """Whether labels are classes or numbers [default: classes if they are text, or whole numbers: in
    tables at most 10 consecutive ones, each in at least 8 rows]"""
    drop: Value
    """Columns of tables to leave out, separated by commas [default: none]"""
    categorical: Value
    """Columns of tables whose values are categories, separated by commas: each value becomes a feature
    that is 0 or 1. auto: every column of texts, with at most 256 values. common: of each column
    of texts the 40 commonest values; dates become numbers, and free text, identifiers and
    columns without a name are left out [default: common]"""
    missing: Optional[Literal["error", "mean", "zero", "indicator"]]
    """How missing numbers (empty cells, NA, null, ?, - or NaN) are treated [default: error; in tables
    indicator]"""
    normalize: Optional[Literal["none", "unit", "standard"]]
    """How features are normalized: unit scales all of them to 0 to 1, standard gives each mean 0 and
    standard deviation 1, and numeric labels, too [default: none; of tables standard]"""
    tokenizer: Value
    """Folder with the tokenizer.json and the chat template that make tokens of conversations [default:
    that of --init-from]"""
    loss_on: Optional[Literal["assistant", "all"]]
    """Tokens of conversations that are trained [default: assistant]"""
    packing: Optional[Literal["auto", "on", "off"]]
    """Whether several conversations share a row; auto: if the model has rotary positions [default:
    auto]"""
    cache_dir: Value
    """Folder for converted copies of files that cannot be memory-mapped [default: beside the files,
    else ~/.cache/ddp-train/copies]"""
    batch_size: Value
    """Global batch size: rows per step, summed over all ranks [default: 128; of tables with more than
    10,000 rows 256]"""
    batch_tokens: Value
    """Global batch size in tokens, a multiple of the model's context; an alternative to --batch-size"""
    micro_batch: Value
    """Largest number of rows that a rank processes at once; gradients accumulate over the rest
    [default: all of its rows]"""
    steps: Value
    """Steps to train, instead of --epochs; 0 saves the untrained model"""
    epochs: Value
    """Passes through the data [default: 5; tables choose --steps]"""
    drop_last: Optional[bool]
    """Skip an epoch's last batch if it is smaller than the others [default: false]"""
    optimizer: Optional[Literal["adamw", "sgd", "muon"]]
    """Optimizer [default: adamw]"""
    lr: Value
    """Peak learning rate [default: 0.001, 0.1 for sgd, 0.02 for muon]"""
    adam_lr: Value
    """muon: peak learning rate of the parameters that adamw updates, on the same schedule [default:
    0.0003]"""
    min_lr: Value
    """Learning rate of the last step, unless the schedule is constant [default: 0]"""
    schedule: Optional[Literal["constant", "linear", "cosine", "wsd"]]
    """Learning rate schedule after the warm-up [default: cosine]"""
    schedule_steps: Value
    """Steps over which the schedule falls, if not over those of the run"""
    linear_start: Value
    """The linear path starts at ridge regression with this penalty, for classes at linear
    discriminants; 0: at zero [default: 0; tables of up to 5,000 rows choose]"""
    warmup_steps: Value
    """Steps to reach the peak learning rate [default: a tenth of all steps, at most 100]"""
    weight_decay: Value
    """Weight decay [default: 0.01, 0 for sgd]"""
    decay: Optional[Literal["matrices", "all"]]
    """What weight decay applies to [default: matrices]"""
    beta1: Value
    """adamw, muon: first-moment decay β₁ [default: 0.9]"""
    beta2: Value
    """adamw, muon: second-moment decay β₂ [default: 0.999, 0.95 for muon]"""
    eps: Value
    """adamw, muon: added to the denominator [default: 1e-8, 1e-10 for muon]"""
    momentum: Value
    """sgd, muon: momentum; muon always uses Nesterov's [default: 0.9, 0.95 for muon]"""
    nesterov: Optional[bool]
    """sgd: Nesterov's momentum [default: false]"""
    group: Value
    """Parameters with another learning rate or weight decay, by name, as in *.bias:weight-
    decay=0,head.*:lr=0.003; in TOML, tables called group with match, lr and weight-decay. The
    first group that matches a name counts [default: none; for tables linear.*, ten times --lr]"""
    grad_clip: Value
    """Largest norm of all gradients together; 0 turns clipping off [default: 0; for tables 1]"""
    label_smoothing: Value
    """Share of the target probability that is spread evenly over all classes [default: 0]"""
    class_weights: Value
    """Weight of each class in the loss: balanced (all classes count the same, however many rows they
    have), numbers in the order of the classes, as in 1,2.5, or by name, as in stays=1,moves=4
    [default: none]"""
    seed: Value
    """Seed of everything random in training [default: 0]"""
    device: Value
    """Device: cpu, cuda (each rank on its own GPU), cuda:N (one rank, on that GPU), or auto: cuda if
    every rank can, else cpu [default: auto]"""
    devices_per_rank: Value
    """GPUs of each rank, over which the model is split: for models too large for one GPU [default: 1]"""
    share_gpus: Optional[bool]
    """Let several ranks share a GPU if there are too few: for tests, slow [default: false]"""
    dtype: Optional[Literal["f32", "tf32", "bf16"]]
    """Precision of the model's computation. tf32 on a CPU: matmuls by three of bf16. Parameters,
    gradients and moments stay f32 [default: f32]"""
    data_on_device: Optional[Literal["auto", "on", "off"]]
    """Keep all training data in GPU memory; auto: where it fits [default: auto]"""
    graph: Optional[Literal["auto", "on", "off"]]
    """Capture a step as a CUDA graph and replay it; auto: on a GPU, unless the layers are split over
    several [default: auto]"""
    recompute_parts: Value
    """How many parts of the model, from the first on, backward computes again. A part ends where only
    one value goes on. For models of blocks there is also --recompute [default: 0]"""
    memory: Value
    """Memory that a rank may use, as in 40GiB: chooses --recompute and --recompute-blocks, or
    --recompute-parts, so that its plan fits with as little recomputing as possible"""
    threads: Value
    """CPU threads of a rank [default: its share of the cores]"""
    bucket_mb: Value
    """Size of a gradient bucket, the unit of reduction, in MB; the first is at most 1 MB [default: 25
    on GPUs, 50 on those of several hosts, 4 on the CPU]"""
    reduce_dtype: Optional[Literal["f32", "bf16"]]
    """Type of gradients in transit [default: f32]"""
    same_bits: Value
    """Make the bits of the model the same on any number of ranks up to V: each batch is cut into V
    shards, which are processed one by one and summed in a fixed tree. See docs/same-bits.md"""
    zero: Value
    """ZeRO stage: 0 keeps all state on every rank; 1 divides the optimizer's moments among the ranks,
    and with bf16 the f32 weights; 2 divides the gradients, too [default: 0]"""
    overlap: Optional[Literal["auto", "on", "off"]]
    """Reduce gradients while the backward pass still runs; auto: with several ranks [default: auto]"""
    nccl: Optional[Literal["fixed", "fast"]]
    """How NCCL adds up gradients: fixed has the same bits in every run; fast leaves the choice to
    NCCL, and bits may differ [default: fixed]"""
    timeout_s: Value
    """Seconds without a sign of progress after which a rank counts as lost: the job ends with exit
    code 77 [default: 600]"""
    checkpoint_every: Value
    """Steps between checkpoints; 0 for the best and the last only [default: an epoch; for tables at
    least a twentieth of the run]"""
    keep: Value
    """Number of newest checkpoints to keep; the best by validation is kept as well [default: 3]"""
    override: Optional[bool]
    """With --resume: continue although settings differ that change the results [default: false]"""
    init_from: Value
    """Start training from saved parameters: of a run, a checkpoint or a Hugging Face folder (Qwen,
    Llama, Mistral, Gemma, GPT-2 and others), from which the model follows, or of a
    model.safetensors that matches the model. If adapters are resumed or used: the folder where
    their base is now"""
    eval_every: Value
    """Steps between evaluations on held-out rows; 0 for one at the end only [default: an epoch; for
    tables a fiftieth of the run]"""
    best: Optional[Literal["loss", "accuracy", "balanced", "auc"]]
    """Metric on held-out rows that decides which evaluation is the best; its checkpoint is kept and
    used by eval, predict and export [default: loss]"""
    stop_after: Value
    """End the run early, after this many evaluations without one that is better by --best; 0 to train
    all steps [default: 0; where tables choose --steps 15]"""
    sample: Value
    """gpt: a text to continue at each evaluation and at the end, with up to 64 tokens, for the metrics
    log and the report; in a run on conversations, a question to answer"""
    sample_held_out: Value
    """The same for the prompts of N held-out conversations, beside the answers that these have
    [default: 0]"""
    log_every: Value
    """Steps between entries in metrics.jsonl [default: 10]"""
    trace: Value
    """Steps of which to write a timeline of all ranks to OUT/trace.json, for ui.perfetto.dev or
    chrome://tracing: 100..110 (both included), 5, or 5.. for all from there"""
    tensorboard: Optional[bool]
    """Also write event files for TensorBoard, to OUT/tensorboard [default: false]"""
    progress: Optional[Literal["auto", "always", "never"]]
    """When progress is shown [default: auto]"""
    log_level: Optional[Literal["error", "warn", "info", "debug", "trace"]]
    """Lowest severity to log on standard error [default: info]"""
    hidden: Value
    """Widths of the hidden layers, separated by commas; write the word none for a linear model
    [default: 256,128]"""
    activation: Optional[Literal["relu", "leaky-relu", "relu2", "gelu", "gelu-tanh", "silu"]]
    """Activation function between the layers [default: relu]"""
    linear_path: Optional[bool]
    """Add a linear model of the inputs to the output. The perceptron then sees x/√(1 + (x/3)²), and
    its last layer begins at zero [default: false; for tables true]"""
    kv_heads: Value
    """Heads of keys and values, each shared by equally many heads; 0 for one per head [default: 0]"""
    head_size: Value
    """Columns of a head; 0 for --width divided by --heads [default: 0]"""
    context: Value
    """Tokens that the model sees at once [default: 128]"""
    longest_context: Value
    """Longest context of the model, for programs that it is exported to; 0 for --context [default: 0]"""
    vocab: Value
    """Different tokens; 0 for as many as the data have [default: 0]"""
    norm: Optional[Literal["layer", "rms"]]
    """Norm of each part [default: layer]"""
    norm_place: Optional[Literal["before", "after", "both"]]
    """Where each part has its norm [default: before]"""
    qk_norm: Optional[Literal["none", "head", "heads"]]
    """RMSNorm of queries and keys [default: none]"""
    position: Optional[Literal["learned", "rope"]]
    """How the model knows positions [default: learned]"""
    mlp: Optional[Literal["gelu", "gelu-tanh", "relu2", "swiglu", "geglu"]]
    """Activation function of the perceptrons [default: gelu-tanh]"""
    bias: Optional[bool]
    """Whether linear layers and norms have a bias [default: true]"""
    qkv_bias: Optional[bool]
    """Whether queries, keys and values have a bias even without --bias [default: false]"""
    tied: Optional[bool]
    """Whether the last layer's weight is that of the embedding [default: true]"""
    norm_epsilon: Value
    """What norms add to the mean of squares [default: 0.00001]"""
    rope_base: Value
    """Base of rotary positions [default: 10000]"""
    rope_scaling: Value
    """How rotary positions are stretched, as in llama3:8:1:4:8192, or none [default: none]"""
    rope_share: Value
    """Share of a head's columns that have rotary positions [default: 1]"""
    rope_skip: Value
    """Every N-th block lacks rotary positions; 0: none does [default: 0]"""
    window_rope_base: Value
    """Base of rotary positions of blocks with a window; 0 for that of the others [default: 0]"""
    window: Value
    """Tokens that each token sees, with itself; 0 for all before it [default: 0]"""
    window_skip: Value
    """Every N-th block lacks a window; 0: none does [default: 0]"""
    attention_scalar: Value
    """q·k is divided by the root of N; 0 for --head-size [default: 0]"""
    attention_cap: Value
    """Scores s of attention become cap·tanh(s / cap); 0 for no cap [default: 0]"""
    logit_cap: Value
    """Logits z become cap·tanh(z / cap); 0 for no cap [default: 0]"""
    scale_embedding: Optional[bool]
    """Whether rows of the embedding are multiplied by the root of --width [default: false]"""
    untrained_tokens: Value
    """Tokens whose rows of the embedding get no gradient where they are inputs [default: none]"""
    export_class: Value
    """Class of transformers that export prefers; none for the first that has such models [default:
    none]"""
    patch: Value
    """Side of a square patch, in pixels [default: 4]"""
    pool: Optional[Literal["mean", "class"]]
    """What the classifier sees [default: mean]"""
    image: Value
    """Shape of an image, as in 28x28, 3x32x32 (planes) or 32x32x3, where the data do not say it"""
    layers: Value
    """Blocks of attention and perceptron [default: 4]"""
    heads: Value
    """Heads of attention [default: 4]"""
    width: Value
    """Columns of the residual stream [default: 128]"""
    mlp_width: Value
    """Width of the perceptrons; 0 for 4 times --width [default: 0]"""
    recompute: Optional[Literal["none", "attention", "block"]]
    """What backward computes again instead of keeping it: less memory, same bits, more time [default:
    none]"""
    recompute_blocks: Value
    """How many blocks --recompute, counted from the first; 0 for all [default: 0]"""
    dropout: Value
    """Probability of dropping an element [default: 0]"""
    config: Value
    """Read settings from this TOML file (or DDP_CONFIG), as in batch-size = 64; the environment
    (DDP_BATCH_SIZE=64) wins over it, and flags over both"""
    ranks: Value
    """Start N ranks on this machine, without MPI; auto: one for each GPU, else one. With --hosts: only
    the first N"""
    hosts: Value
    """Start ranks on these hosts over ssh, with the number of ranks after each host: node1:4,node2:4"""
    hostfile: Value
    """The same, from a file with a host in each line: node1 slots=4, or node1:4"""
    min_ranks: Value
    """Continue without lost ranks while at least N are left; --restarts then counts ranks. Also for
    processes that srun or the variables RANK and WORLD_SIZE start, one on each host"""
    spares: Value
    """Hosts that take over the ranks of a lost one, with the number of ranks each has room for"""
    restarts: Value
    """How often to start again, with --resume auto, after a rank was lost"""
    grace_s: Value
    """Seconds that ranks have to save after a signal to stop"""
