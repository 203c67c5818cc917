/* The ordinary event of the hot path: what `recording/lane.py` does for it, without a Python frame.
 *
 * A Python function that is called a few times a step finds the caches cold: 1-2 us each, whatever it does. Here an
 * ordinary phase is two clock readings and a tuple. Everything else (a step that begins or ends other than by the next
 * batch, nested phases, other threads, exceptions, faults) is handed to the Python function that each hook was given,
 * which alone says what is right; `tests/test_native.py` holds the two against each other.
 *
 * A hook is called where torch's function was (hook.c: what they share):
 *
 *   phase.c       a phase of a step
 *   forward.c     a module's forward
 *   next.c        a batch is asked for: a step ends, and the next one begins
 *   returned.c    whose that batch is, where a worker made it
 *
 * They ask fastpath.c whether this is the thread that is followed, lane.c what that has open, and source.c where the
 * batch is from; and add a record to the step (step.c). In a worker:
 *
 *   queues.c      torch's loop takes a task and gives a batch
 *   fetch.c       that is a fetch, which begins and ends
 *   worker.c      what it changes
 *
 * The others hand a call on to Python: method.c that of a tensor's method, wherever it stands (descriptor.c: written in
 * C; subscript.c: `x[index]`), follow.c that of a builtin. exceptions.c is for all; module.c is what Python imports.
 */

#ifndef OTEL_DL_NATIVE_H
#define OTEL_DL_NATIVE_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stddef.h>
#include <stdint.h>
#include <structmember.h>
#include <time.h>

/* What is said in Python as well, in `recording/records.py::Kind`, `forensics/layout.py`, `workers/ring.py` and
 * `workers/loop.py`; `tests/test_native.py` holds each against it. */
#define CONSTANTS(_)                                                                                                  \
    _(NEXT, 1) _(FORWARD, 4) _(EVAL_FORWARD, 128 | 4) _(NEUTRAL_FORWARD, 256 | 4)                                     \
    _(STEP, 256) _(PHASES, 384) _(BATCH, 640) _(SAMPLES, 688) _(SAMPLES_MOST, 128) _(DONE, 1712) _(SIZE, 4096)        \
    _(FORM_NONE, 0) _(FORM_INTEGERS, 1) _(FETCH, 2)                                                                   \
    _(RING_HEAD, 0) _(RING_FIRST, 64) _(RING_SLOTS, 1024) _(SLOW, 4) _(WARM, 16)
#define ONE(name, value) name = value,
enum { CONSTANTS(ONE) };
#undef ONE
static const int64_t CHECK = 0x0D1E5EED0D1E5EED;

/* Nothing leaves the library but PyInit__native. */
#pragma GCC visibility push(hidden)

/* module.c */

extern PyObject *str_training, *str_modules, *str_parameters, *str_compiled_call_impl, *str_call_impl, *str_source,
    *str_rcvd_idx, *str_device;
extern PyObject *empty_string, *zero, *copy;
#ifndef __linux__
extern PyObject *perf_counter_ns;
#endif

/* exceptions.c */

PyObject *take_exception(void);
void put_exception(PyObject *error);
int no_attribute(void);

/* The clock. */

/* The reading of time.perf_counter_ns, -1 with an exception set. */
static inline long long
now(void)
{
#ifdef __linux__
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time); /* as Python/pytime.c does on Linux, 3.10 to 3.14 */
    return (long long)time.tv_sec * 1000000000LL + time.tv_nsec;
#else
    PyObject *reading = PyObject_CallNoArgs(perf_counter_ns);
    if (reading == NULL)
        return -1;
    long long value = PyLong_AsLongLong(reading);
    Py_DECREF(reading);
    return value;
#endif
}

/* The status page. */

/* Memory of the page at `address`; NULL where there is none. */
static inline int64_t *
in_page(unsigned long long address, size_t offset)
{
    return address ? (int64_t *)(uintptr_t)(address + offset) : NULL;
}

/* Writes a block that ends with its check word; `extra` is in that alone. The stores stay so many, in this order. */
static inline void
write_block(int64_t *at, const int64_t *numbers, int count, int64_t extra)
{
    volatile int64_t *block = at;
    int64_t check = CHECK ^ extra;
    for (int i = 0; i < count; i++) {
        block[i] = numbers[i];
        check ^= numbers[i];
    }
    block[count] = check;
}

#define BLOCK(at, extra, ...)                                                                                         \
    write_block(at, (const int64_t[]){__VA_ARGS__}, sizeof((const int64_t[]){__VA_ARGS__}) / sizeof(int64_t), extra)

/* step.c */

typedef struct {
    PyObject_HEAD
    long long number, start;
    long long dropped, segment, seen;
    char stepped, settled, plain;
    PyObject *records; /* a list */
    PyObject *collectives; /* a list */
    PyObject *context;
} Step;

extern PyTypeObject StepType;
int add_record(Step *step, PyObject *kind, long long start, long long end, PyObject *batch);

/* lane.c */

typedef struct {
    PyObject_HEAD
    long kinds;
    PyObject *step; /* a Step or None */
} Lane;

extern PyTypeObject LaneType;

/* source.c */

typedef struct {
    PyObject_HEAD
    char alone, in_order;
    long long loader, epoch, fetched, round, last;
    PyObject *batch, *nonce, *pids, *method;
} Source;

extern PyTypeObject SourceType;
PyObject *batch_tuple(Source *source, long long place, PyObject *nonce, long long round, PyObject *worker,
                      PyObject *pid, PyObject *method);

/* fastpath.c */

typedef struct {
    PyObject_HEAD
    PyObject *lane; /* a Lane or None */
    uint64_t thread; /* of the thread's state: an ident is given to a later thread again */
    PyObject *variable; /* of the OpenTelemetry context; None: nothing is ordinary */
    PyObject *durations; /* a list: of the ordinary steps since Python looked last */
    Py_ssize_t capacity;
    long long limit, attention;
    PyObject *hold; /* takes an ordinary step that has ended; None: its records are thrown away */
    PyObject *on_phase, *on_step; /* (kind, begins, instant): are told of each boundary; None: nobody is */
    long long held_in, held_out, held_most, not_held;
    int64_t *step_word, *phase_block, *batch_block; /* in the status page; NULL: there is none */
} FastPath;

extern PyTypeObject FastPathType;

/* In the page: the outermost phase is of this kind since `instant`; 0: none is open since then. */
static inline void
page_phase(FastPath *self, int64_t kind, int64_t instant)
{
    if (self->phase_block != NULL)
        BLOCK(self->phase_block, 0, kind, instant);
}

/* The calling thread's lane where it is the one that is followed (borrowed), else NULL. */
static inline Lane *
followed(FastPath *fast)
{
    if (fast->lane == NULL || fast->lane == Py_None || fast->thread != PyThreadState_GetID(PyThreadState_Get()))
        return NULL;
    return (Lane *)fast->lane;
}

/* The step in which a phase that begins now is simply recorded (borrowed), else NULL. */
static inline Step *
ordinary(FastPath *fast, Lane *lane)
{
    if (lane->kinds || lane->step == NULL || fast->variable == NULL || fast->variable == Py_None)
        return NULL;
    if (!PyObject_TypeCheck(lane->step, &StepType))
        return NULL;
    Step *step = (Step *)lane->step;
    if (!step->settled || step->records == NULL || !PyList_CheckExact(step->records))
        return NULL;
    PyObject *context = NULL;
    if (PyContextVar_Get(fast->variable, NULL, &context) < 0) {
        PyErr_Clear();
        return NULL;
    }
    int same = context != NULL && context == step->context;
    Py_XDECREF(context);
    return same ? step : NULL;
}

/* Tells `observer` (`recording/observers.py`), where there is one, of a boundary at `instant`; -1 with an exception set.
 */
static inline int
observe(PyObject *observer, PyObject *kind, int begins, long long instant)
{
    if (observer == NULL || observer == Py_None)
        return 0;
    PyObject *reading = PyLong_FromLongLong(instant);
    if (reading == NULL)
        return -1;
    Py_INCREF(observer); /* it may take itself off */
    PyObject *answer = PyObject_CallFunctionObjArgs(observer, kind, begins ? Py_True : Py_False, reading, NULL);
    Py_DECREF(observer);
    Py_DECREF(reading);
    Py_XDECREF(answer);
    return answer == NULL ? -1 : 0;
}

/* hook.c */

typedef struct {
    PyObject_HEAD
    vectorcallfunc vectorcall;
    PyObject *dict;
    PyObject *weakrefs;
    FastPath *fast;
    PyObject *original; /* what stood there */
    PyObject *recorded; /* the same call, recorded in Python, whatever the case */
    PyObject *ended; /* (kind, subject, start): the call has returned, out of the ordinary */
    PyObject *failed; /* (kind, subject, start, exception): an exception left it */
    PyObject *fault; /* (exception): what any of the others raised */
    PyObject *kind, *eval_kind, *neutral_kind;
    PyObject *is_grad_enabled;
    long kinds;
    char own; /* Forward: `original` is torch's own */
    char optimizes; /* Phase: its end makes the step one that stepped */
} Hook;

extern PyTypeObject PhaseType, ForwardType, NextType, ReturnedType;
int own_fault(Hook *hook);
void call_failed(Hook *hook, PyObject *kind, PyObject *subject, long long start);
PyObject *call_ended(Hook *hook, PyObject *kind, PyObject *subject, long long start, PyObject *result);
PyObject *not_made(PyObject *self, PyObject *const *args, size_t nargsf, PyObject *kwnames);

/* phase.c, forward.c, next.c, returned.c */

PyObject *call_phase(Hook *hook, Lane *lane, Step *step, PyObject *kind, long kinds, PyObject *subject,
                     PyObject *const *args, size_t nargsf, PyObject *kwnames);
PyObject *phase_call(Hook *hook, PyObject *const *args, size_t nargsf, PyObject *kwnames);
PyObject *forward_call(Hook *hook, PyObject *const *args, size_t nargsf, PyObject *kwnames);
PyObject *next_call(Hook *hook, PyObject *const *args, size_t nargsf, PyObject *kwnames);
PyObject *returned_call(Hook *hook, PyObject *const *args, size_t nargsf, PyObject *kwnames);

/* worker.c, fetch.c, queues.c */

typedef struct {
    PyObject_HEAD
    char fetching, asked;
    long long round, index, start, room, span_limit, dropped, entries_count, fetches, mean;
    PyObject *samples;  /* what torch's fetcher was given to read */
    PyObject *span;     /* stands for the fetch in the context; None: there is none */
    PyObject *attached; /* the context in which it is */
    PyObject *entries;  /* the dict of the environment, None where nobody looks after it */
    PyObject *variable;
    long long pid;
    int64_t *phase, *batch, *sample_words, *done, *ring; /* NULL: there is no page */
    int64_t began;
} Worker;

extern PyTypeObject WorkerType, GetType, PutType;
int worker_received(Worker *worker, PyObject *message);
int worker_answers(Worker *worker, PyObject *message);

/* method.c, subscript.c, descriptor.c */

typedef struct {
    PyObject_HEAD
    PyObject *original;
    PyObject *waits;
    PyObject *overrides; /* torch._C._has_torch_function_unary */
    PyObject *is_cpu;    /* the getter of TensorBase.is_cpu */
    PyObject *harmless;  /* tuple of types of arguments that name no place: dtype, memory_format */
    PyObject *cpu;      /* torch.device("cpu") */
    int form;
} Method;

extern PyTypeObject MethodType;
int tensor_on_cpu(PyObject *overrides, PyObject *is_cpu, PyObject *tensor);
int names_cpu(PyObject *cpu, PyObject *device);
int method_is_plain(Method *self, PyObject *tensor, PyObject *args, PyObject *kwargs);
PyObject *subscript(PyObject *self, PyObject *args);
PyObject *swap_subscripts(PyObject *self, PyObject *args);
PyObject *own_method(PyObject *self, PyObject *descriptor);
PyObject *swap_method(PyObject *self, PyObject *args);

/* follow.c */

extern PyTypeObject FollowType;

#pragma GCC visibility pop

#endif
