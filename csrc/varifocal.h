/* The C interface of libvarifocal: fast attention kernels for CPUs.
 *
 * Every call takes one struct of sizes, pointers and strides, fills caller-owned outputs and returns a status.
 * Strides count elements, not bytes. The last dimension of every tensor is contiguous. Nothing of a call is
 * retained after it (but for a piece of work space). Results do not depend on `threads`, bit for bit.
 *
 * Letters: B batch, H query heads, G key/value heads (H a multiple of G), T queries, S keys, D head width, M branches.
 */
#ifndef VARIFOCAL_H
#define VARIFOCAL_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define VF_API __attribute__((visibility("default")))
#define VF_MAX_BRANCHES 4
#define VF_MAX_WIDTH 4096   /* of a head */
#define VF_MAX_UNITS 1024   /* of a pair gate's network */
#define VF_MOST_FEW 16      /* vectors or tokens of a call for few of them */
#define VF_MAX_ROTATED 1024 /* width of a head that a norm may rotate */

typedef enum vf_status {
    VF_OK = 0,
    VF_BAD_TARGET = 1,   /* unknown target, or one this processor cannot run */
    VF_BAD_SIZE = 2,     /* a negative size, H not a multiple of G, or M outside 1..VF_MAX_BRANCHES */
    VF_BAD_POINTER = 3,  /* a required pointer is null */
    VF_BAD_POSITION = 4, /* a query with start <= position needs 0 <= start and position < S */
    VF_BAD_BRANCH = 5,   /* negative window or prefix, or a soft window with edge <= 0 */
    VF_NO_MEMORY = 6,
    VF_BAD_DTYPE = 7,
    VF_BAD_SELECTION = 8, /* selected keys outside the visible range or out of order, or blocks of overlapping documents */
    VF_BAD_SCORE = 9,     /* unknown score, a threshold outside (0, 1), or an empty table of biases */
    VF_BAD_LABEL = 10     /* a label below 0, or not below the number of classes */
} vf_status;

/* Changes whenever a struct or a function does. Who loads this library at run time compares it, and the size of every
 * struct that it passes, before the first call. */
#define VF_ABI_VERSION 5
VF_API int32_t vf_abi_version(void);
VF_API int64_t vf_struct_size(const char *name); /* sizeof, such as "vf_mixture"; -1 for a name that is none */

typedef enum vf_dtype { VF_FLOAT32 = 0, VF_BFLOAT16 = 1, VF_INT8 = 2 /* of matrices only */ } vf_dtype;

/* Targets are the instruction sets the kernels were compiled for, best first. Index 0 .. vf_target_count() - 1. */
VF_API int32_t vf_target_count(void);
VF_API const char *vf_target_name(int32_t target);
VF_API int32_t vf_target_runs(int32_t target); /* 1 if this processor can run it */
VF_API const char *vf_status_text(int32_t status);

/* A [B, heads, rows, D] tensor: element (b, h, t, d) lies at data[b * stride[0] + h * stride[1] + t * stride[2] + d]. */
typedef struct vf_tensor {
    void *data;
    int64_t stride[3];
} vf_tensor;

/* One branch of a mixture. To query head h it gives key j at distance x = position - j the weight
 *   max(x < window[h], j - start < prefix[h], width ? clamp((width - x) / edge, 0, 1) * (x < limit) : 0)
 * inside the visible range start <= j <= position. */
typedef struct vf_branch {
    const int32_t *window; /* [H]; 0: no window part, INT32_MAX: causal */
    const int32_t *prefix; /* [H]; 0: no prefix part */
    const float *width;    /* [B, H, T] contiguous, or null: no soft part */
    int32_t limit;
    float edge;
} vf_branch;

/* How a query rates a key. */
typedef enum vf_score {
    VF_SCORE_DOT = 0,            /* scale_h q . k */
    VF_SCORE_PAIR_PRODUCT = 1,   /* a pair gate: scale_h q . k * s */
    VF_SCORE_PAIR_LOG = 2,       /* scale_h q . k + log s */
    VF_SCORE_PAIR_THRESHOLD = 3, /* the same, and pairs with s < threshold are not read */
    VF_SCORE_DISTANCE_BIAS = 4   /* scale_h q . k + table[min(x, N - 1)] */
} vf_score;

/* A learned gate on every pair: s_ij = sigmoid(output_h . GELU(a_i + b_j) + bias_h). */
typedef struct vf_pair_gate {
    int64_t units;       /* P, the width of the hidden layer */
    vf_tensor a, b;      /* [B, H, T, P] and [B, H, S, P], float32 */
    const float *output; /* [H, P] contiguous */
    const float *bias;   /* [H], or null: 0 */
    float threshold;
} vf_pair_gate;

/* A table of biases by distance. A relative bias, ALiBi and any prior of positions are a table [H, N], Shaw's
 * relative keys a table [B, H, T, N]. An entry may be -inf: that distance is not read. */
typedef struct vf_distance_bias {
    int64_t distances; /* N */
    const float *table;
    int64_t stride[3]; /* of batch, head and query; 0 for batch or query: shared. The last dimension is contiguous */
} vf_distance_bias;

typedef struct vf_mixture {
    int64_t batch, heads, kv_heads, queries, keys, head_width;
    int32_t branch_count, dtype, threads;
    int32_t skip_closed; /* 1: a branch of weight 0 over a whole block of queries may be left out (its logsumexp is +inf) */
    int32_t score;       /* vf_score */
    vf_tensor q, k, v;   /* of `dtype` */
    const float *scale;  /* [H] */
    const int32_t *position, *start; /* [B, T] contiguous */
    const float *weights;            /* [B, H, T, M] contiguous, or null: every weight is 1 */
    vf_branch branch[VF_MAX_BRANCHES];
    vf_pair_gate pair;     /* read if `score` is a pair gate */
    vf_distance_bias bias; /* read if `score` is a bias by distance */
    vf_tensor out;         /* [B, H, T, D] of `dtype` */
    float *logsumexp;    /* [B, H, T, M] contiguous: log of the sum of weight * exp(score), -inf where a branch is empty */
    float *norm;   /* [B, H, T, M, 2] contiguous, for the backward; may be null when none follows: the largest score,
                      in powers of 2, and 1 / sum of weight * 2^(score - largest); infinity and 0 for an empty or a
                      closed branch. Unlike logsumexp these lose nothing to rounding, so the backward sees the forward's
                      own probabilities. */
    vf_tensor branch_out[VF_MAX_BRANCHES]; /* O_m of `dtype` for m < M - 1; data may be null when no backward follows */
} vf_mixture;

/* delta = dO . O for every query, 0 for one that sees no key. All that a backward needs to know of outputs, so these
 * can be freed before gradients of their size are allocated. */
typedef struct vf_delta {
    int64_t batch, heads, queries, head_width;
    int32_t dtype, threads;
    vf_tensor grad_out, out;         /* [B, H, T, D] of `dtype` */
    const int32_t *position, *start; /* [B, T] contiguous */
    float *delta;                    /* [B, H, T] contiguous */
} vf_delta;

VF_API int32_t vf_find_delta(int32_t target, const vf_delta *call);

/* forward fields as they were after vf_mixture_forward; its outputs are not read */
typedef struct vf_mixture_grad {
    vf_mixture forward;
    vf_tensor grad_out;       /* of `dtype` */
    const float *delta;       /* [B, H, T, M] contiguous: of branch_out[m] for m < M - 1, of out for the last */
    const float *grad_logsumexp;    /* [B, H, T, M] contiguous, or null: 0 */
    vf_tensor grad_q;         /* float32, whatever `dtype`: it is summed up in place */
    vf_tensor grad_k, grad_v; /* of `dtype` */
    int32_t accumulate;       /* 1: added to what grad_q, grad_k and grad_v hold; 0: they are overwritten */
    float *grad_weights;      /* [B, H, T, M] contiguous, or null: not wanted */
    float *grad_width[VF_MAX_BRANCHES]; /* [B, H, T] contiguous, or null: not wanted */
    /* Of a pair gate: all of them. Other scores leave the gradient of scale to the caller: q . dq / scale. */
    vf_tensor grad_pair_a, grad_pair_b; /* float32 */
    float *grad_pair_output;            /* [H, P] contiguous */
    float *grad_pair_bias, *grad_scale; /* [H] */
    /* Of a bias by distance: with the strides of the table, summed where they are 0; or null: not wanted. */
    float *grad_bias_table;
} vf_mixture_grad;

VF_API int32_t vf_mixture_forward(int32_t target, const vf_mixture *call);
VF_API int32_t vf_mixture_backward(int32_t target, const vf_mixture_grad *call);

/* The keys, or blocks of keys, that a query rates highest by q . k. Blocks hold `block` keys counted from the query's
 * start; those completed before the query's own block are rated by q . (mean of their keys). Of equal scores the lower
 * index wins. */
typedef struct vf_select {
    int64_t batch, heads, kv_heads, queries, keys, head_width;
    int64_t capacity; /* entries of `selected` per query */
    int32_t dtype, threads;
    int32_t block;    /* 0: keys */
    vf_tensor q, k;     /* of `dtype`; k.data may be null when `pooled` is given */
    vf_tensor pooled;   /* float32 [B, G, ceil(S / block), D] as vf_pool keeps it, or data null: pooled from k */
    const int32_t *position, *start; /* [B, T] contiguous */
    const int32_t *budget;           /* [B, T] contiguous: how many to select, as far as there are any */
    int32_t *selected; /* [B, H, T, capacity] contiguous, ascending: keys, or first keys of blocks; -1 beyond the selected */
} vf_select;

VF_API int32_t vf_select_best(int32_t target, const vf_select *call);

/* Means of blocks of keys, kept up to date as keys arrive. A block whose first key is f lies in row f / block of
 * `pooled`. Key t starts a row anew if it is the first of its block, else it is added to it, divided by `block`. */
typedef struct vf_pool {
    int64_t batch, kv_heads, new_keys, keys, head_width;
    int32_t block, dtype, threads;
    vf_tensor k;                     /* [B, G, T, D] of `dtype`: the new keys, in order */
    const int32_t *position, *start; /* [B, T]: index of each new key and of the first key of its document */
    vf_tensor pooled;                /* float32 [B, G, ceil(S / block), D] */
} vf_pool;

VF_API int32_t vf_pool_keys(int32_t target, const vf_pool *call);

/* Softmax attention over selected keys. block = 0: exactly the selected keys (and the query's own if include_self).
 * block > 0: every selected block, and the query's own block up to the query. */
typedef struct vf_selected {
    int64_t batch, heads, kv_heads, index_heads, queries, keys, head_width; /* H a multiple of index_heads */
    int64_t capacity;
    int32_t dtype, threads;
    int32_t block, include_self;
    vf_tensor q, k, v;               /* of `dtype` */
    const float *scale;              /* [H] */
    const int32_t *position, *start; /* [B, T] contiguous */
    const int32_t *selected;           /* [B, index_heads, T, capacity] contiguous, ascending, -1 beyond the selected */
    const float *weights;            /* [B, H, T] contiguous factors of the output, or null: 1 */
    vf_tensor out;                   /* [B, H, T, D] of `dtype` */
    float *logsumexp;                      /* [B, H, T] contiguous, -inf where nothing is read */
    float *norm; /* [B, H, T, 2] contiguous, for the backward; may be null when none follows: as in vf_mixture */
} vf_selected;

/* forward fields as they were after vf_attend_selected; its output and logsumexp are not read */
typedef struct vf_selected_grad {
    vf_selected forward;
    vf_tensor grad_out;       /* of `dtype` */
    const float *delta;       /* [B, H, T] contiguous, of out; needed for blocks only */
    const float *grad_logsumexp;    /* [B, H, T] contiguous, or null: 0 */
    vf_tensor grad_q;         /* float32, whatever `dtype` */
    vf_tensor grad_k, grad_v; /* of `dtype` */
    float *grad_weights;      /* [B, H, T] contiguous, or null: not wanted */
} vf_selected_grad;

VF_API int32_t vf_attend_selected(int32_t target, const vf_selected *call);
VF_API int32_t vf_attend_selected_backward(int32_t target, const vf_selected_grad *call);

/* The steps of a language model between its matrix products, in float32. All arrays are contiguous. */

/* out = weight * x / sqrt(mean(x^2) + epsilon) over the last dimension, then rotated by halves where angles are given:
 * (u, v) becomes (u cos - v sin, v cos + u sin). */
typedef struct vf_norm {
    int64_t tokens, heads, width;
    int64_t angles; /* rows of cosines and sines; token t takes row t % angles */
    int32_t threads;
    float epsilon;
    const float *x;               /* [tokens, heads, width] */
    const float *weight;          /* [width] */
    const float *cosines, *sines; /* [angles, width], or null: not rotated */
    float *out;                   /* [tokens, heads, width] */
    float *inverse;               /* [tokens, heads]: 1 / sqrt(mean(x^2) + epsilon) */
} vf_norm;

typedef struct vf_norm_grad {
    vf_norm forward; /* with x, or where that is null, with out and inverse: see vf_norm_restorable */
    int64_t parts;
    const float *grad_out; /* [tokens, heads, width] */
    float *grad_x;         /* [tokens, heads, width] */
    float *grad_weight;    /* [parts, width], to be added up */
} vf_norm_grad;

/* out = gate / (1 + exp(-gate)) * up */
typedef struct vf_swiglu {
    int64_t elements;
    int32_t threads;
    const float *gate, *up;
    float *out;
} vf_swiglu;

typedef struct vf_swiglu_grad {
    vf_swiglu forward; /* its out is not read */
    const float *grad_out;
    float *grad_gate, *grad_up;
} vf_swiglu_grad;

/* losses = log(sum(exp(logits))) - logits[label] of each row. The logits become e = exp(logits - the row's largest), and
 * share = 1 / sum(e), so that softmax = share * e: whoever multiplies by it next can scale what is smaller. A row
 * with NaN or infinity has both NaN, and logits of no use. */
typedef struct vf_cross_entropy {
    int64_t rows, classes;
    int32_t threads;
    float *logits;         /* [rows, classes] */
    const int64_t *labels; /* [rows] */
    float *losses;         /* [rows] */
    float *shares;         /* [rows] */
} vf_cross_entropy;

/* A matrix of weights, contiguous: float32, bfloat16, or int8 with a scale for each `group` columns of a row. */
typedef struct vf_matrix {
    const void *data;    /* [rows, columns] */
    const float *scales; /* [rows, columns / group], of int8 only */
    const float *bias;   /* [rows], or null: 0 */
    int64_t rows, columns;
    int32_t kind;  /* vf_dtype */
    int32_t group; /* a multiple of 16 that divides the columns, of int8 only */
} vf_matrix;

/* out = matrix x + bias for 1 .. VF_MOST_FEW vectors. */
typedef struct vf_linear {
    vf_matrix matrix;
    int64_t vectors;
    int32_t threads;
    const float *x; /* [vectors, columns] contiguous */
    float *out;     /* [vectors, rows] contiguous */
} vf_linear;

/* A layer for 1 .. VF_MOST_FEW tokens. All arrays are contiguous. */
typedef struct vf_layer {
    int64_t tokens, width, heads, kv_heads, head_width;
    int64_t angles; /* rows of cosines and sines; token t takes row t % angles */
    int32_t threads;
    float epsilon;
    vf_matrix q, k, v, o, gate, up, down;
    const float *input_norm, *output_norm; /* [width] */
    const float *q_norm, *k_norm;          /* [head_width], or null: none */
    const float *cosines, *sines;          /* [angles, head_width] */
    float *x;             /* [tokens, width]: the layer's input; vf_layer_finish leaves its output there */
    float *normed;        /* [tokens, width]: the normed input, then work space */
    float *queries;       /* [tokens, heads, head_width] */
    float *keys, *values; /* [tokens, kv_heads, head_width] */
    float *attended;      /* [tokens, heads, head_width] */
    float *inner;         /* [tokens, gate.rows]: work space */
} vf_layer;

/* What is kept of one key head, where heads keep different tokens: the last `keys` of all, the new ones included. What
 * was forgotten between a document's first keys and those of a window is closed up: such a head's queries stand that
 * much earlier, and the documents of which something was forgotten begin with its first key. */
typedef struct vf_kept {
    vf_tensor k, v; /* [B, 1, keys, D] */
    int64_t keys;   /* at least T, at most S */
} vf_kept;

/* A layer whose branches are windows and prefixes that no token changes, with one gate at most: all of it. The new keys
 * and values are written to the last rows of attention.k and attention.v, or of what each head keeps. The gate of two branches is the sigmoid of
 * mix_start + mix_warmth * (mix x + its bias), capped by mix_cap * tanh(z / mix_cap) if that is above 0; mix.data may be
 * null: the bias alone. attention.weights is then work space [B, H, T, 2]. */
typedef struct vf_step {
    vf_layer layer;       /* tokens = batch * queries of `attention`, in that order */
    vf_mixture attention; /* float32; its q is layer.queries, its out layer.attended */
    vf_matrix mix;
    const float *mix_warmth; /* one number */
    float mix_start, mix_cap;
    const vf_kept *kept; /* [G] in place of attention.k and attention.v, or null */
    const float *sink;   /* [H]: exp(sink) is added to the softmax's sum of one branch; or null */
} vf_step;

VF_API int32_t vf_linear_of_few(int32_t target, const vf_linear *call);
VF_API int32_t vf_layer_project(int32_t target, const vf_layer *call); /* fills normed, queries, keys, values */
VF_API int32_t vf_layer_finish(int32_t target, const vf_layer *call);  /* from attended to the output in x */
VF_API int32_t vf_layer_step(int32_t target, const vf_step *call);

/* 1 if x can be had back from out and inverse without loss that matters, else 0; reads weight, cosines and sines.
 * No weight may be near 0; of a rotated pair both must turn by the same angle and have weights of like size, or the
 * larger one's rounding drowns the smaller one. */
VF_API int32_t vf_norm_restorable(const vf_norm *call);
VF_API int32_t vf_norm_forward(int32_t target, const vf_norm *call);
VF_API int32_t vf_norm_backward(int32_t target, const vf_norm_grad *call);
VF_API int32_t vf_swiglu_forward(int32_t target, const vf_swiglu *call);
VF_API int32_t vf_swiglu_backward(int32_t target, const vf_swiglu_grad *call);
VF_API int32_t vf_cross_entropy_of_rows(int32_t target, const vf_cross_entropy *call);

#ifdef __cplusplus
}
#endif
#endif
