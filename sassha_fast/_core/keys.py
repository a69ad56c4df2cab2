"""Keys of the per-parameter state."""

STEP = "step"  # t: steps that this parameter has taken
HESSIAN_STEP = "hessian_step"  # the optimizer's refresh clock when it took the last of them
EXP_AVG = "exp_avg"  # m
HESSIAN = "exp_hessian_diag"  # D
BIAS2 = "bias_correction2"  # 1 − β2^t of its last refresh, 0 before the first
KEYS = frozenset((STEP, HESSIAN_STEP, EXP_AVG, HESSIAN, BIAS2))

# Where state has fewer bits than float32 (:mod:`sassha_fast.formats`):
EXP_AVG_SCALE = "exp_avg_scale"  # of every group of m
HESSIAN_SCALE = "exp_hessian_diag_scale"  # of every group of D
CORRECTION = "weight_correction"  # what the parameter lacks of x, in parts of its last place
# Their names in checkpoints: tools that match tensors by name would copy numbers of float32 into codes.
SAVED_CODES = {EXP_AVG: "exp_avg_codes", HESSIAN: "exp_hessian_diag_codes", CORRECTION: "weight_correction_codes"}
CODES_ORDER = "codes_order"  # beside codes of 8 bits in checkpoints: in which order of dimensions groups lie
# Names that checkpoints alone have. In state they stand with None, as torch asks a checkpoint that was saved with
# StateDictOptions(flatten_optimizer_state_dict=True) only for the names that the state of the optimizer has.
ONLY_SAVED = (*SAVED_CODES.values(), CODES_ORDER)
CORRECTION_OF = "weight_correction_mantissa"  # bits of mantissa of the dtype whose last place that is
COMPACT_KEYS = (CORRECTION, EXP_AVG_SCALE, HESSIAN_SCALE, CORRECTION_OF)  # as Plan.bind_state takes them

# Where x is kept in state, and the parameter holds x + ε:
WEIGHT = "weight"  # x
ASCENT_SCALE = "ascent_scale"  # the parameter holds x + scale·m (ASAM: x + scale·m⊙x²)
ASCENT_DRAW = "ascent_draw"  # number of the draw that it was rounded with, if it is of reduced precision
KEYS_WITH_X = KEYS | {WEIGHT, ASCENT_SCALE, ASCENT_DRAW}

# In parameter groups of AdaHessian: what D is an average of, by the name of a Sample. Groups of the others have none:
# torch.distributed.checkpoint refuses older checkpoints where groups have a key more, and would drop it in theirs.
CURVATURE = "curvature"
