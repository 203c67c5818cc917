/* The ordinary event of the hot path: what `recording/lane.py` does for it, without a Python frame.
 *
 * A Python function that is called a few times a step finds the caches cold: 1-2 us each, whatever it does. Here an
 * ordinary phase is two clock readings and a tuple. Everything else (a step that begins or ends other than by the next
 * batch, nested phases, other threads, exceptions, faults) is handed to the Python function that each hook was given,
 * which alone says what is right; `tests/test_native.py` holds the two against each other.
 */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stddef.h>
#include <stdint.h>
#include <structmember.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

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

#ifndef SOURCE
#define SOURCE "" /* the digest of this file, given by hatch_build.py */
#endif

static PyObject *str_training, *str_modules, *str_parameters, *str_compiled_call_impl, *str_call_impl, *str_source,
    *str_rcvd_idx, *str_device;
static PyObject *empty_string, *zero, *copy;
#ifndef __linux__
static PyObject *perf_counter_ns;
#endif

/* The reading of time.perf_counter_ns, -1 with an exception set. */
static long long
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

enum { NOTHING = 1 }; /* the Adler-32 of no samples */

/* Step: the part of `records.Step` that the ordinary step changes. */

typedef struct {
    PyObject_HEAD
    long long number, start;
    long long dropped, segment, seen;
    char stepped, settled, plain;
    PyObject *records; /* a list */
    PyObject *collectives; /* a list */
    PyObject *context;
} Step;

static PyMemberDef step_members[] = {
    {"number", T_LONGLONG, offsetof(Step, number), 0, NULL},
    {"start", T_LONGLONG, offsetof(Step, start), 0, NULL},
    {"dropped", T_LONGLONG, offsetof(Step, dropped), 0, NULL},
    {"segment", T_LONGLONG, offsetof(Step, segment), 0, NULL},
    {"seen", T_LONGLONG, offsetof(Step, seen), 0, NULL},
    {"stepped", T_BOOL, offsetof(Step, stepped), 0, NULL},
    {"settled", T_BOOL, offsetof(Step, settled), 0, NULL},
    {"plain", T_BOOL, offsetof(Step, plain), 0, NULL},
    {"records", T_OBJECT, offsetof(Step, records), 0, NULL},
    {"collectives", T_OBJECT, offsetof(Step, collectives), 0, NULL},
    {"context", T_OBJECT, offsetof(Step, context), 0, NULL},
    {NULL}};

static int
step_traverse(Step *self, visitproc visit, void *arg)
{
    Py_VISIT(self->records);
    Py_VISIT(self->collectives);
    Py_VISIT(self->context);
    return 0;
}

static int
step_clear(Step *self)
{
    Py_CLEAR(self->records);
    Py_CLEAR(self->collectives);
    Py_CLEAR(self->context);
    return 0;
}

static void
step_dealloc(Step *self)
{
    PyObject_GC_UnTrack(self);
    step_clear(self);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

static PyTypeObject StepType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "otel_dl.recording._native.StepState",
    .tp_basicsize = sizeof(Step),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC,
    .tp_new = PyType_GenericNew,
    .tp_members = step_members,
    .tp_traverse = (traverseproc)step_traverse,
    .tp_clear = (inquiry)step_clear,
    .tp_dealloc = (destructor)step_dealloc,
};

/* Lane: what a thread has open. */

typedef struct {
    PyObject_HEAD
    long kinds;
    PyObject *step; /* a Step or None */
} Lane;

static PyMemberDef lane_members[] = {
    {"kinds", T_LONG, offsetof(Lane, kinds), 0, NULL},
    {"step", T_OBJECT, offsetof(Lane, step), 0, NULL},
    {NULL}};

static int
lane_traverse(Lane *self, visitproc visit, void *arg)
{
    Py_VISIT(self->step);
    return 0;
}

static int
lane_clear(Lane *self)
{
    Py_CLEAR(self->step);
    return 0;
}

static void
lane_dealloc(Lane *self)
{
    PyObject_GC_UnTrack(self);
    lane_clear(self);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

static PyTypeObject LaneType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "otel_dl.recording._native.LaneState",
    .tp_basicsize = sizeof(Lane),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC,
    .tp_new = PyType_GenericNew,
    .tp_members = lane_members,
    .tp_traverse = (traverseproc)lane_traverse,
    .tp_clear = (inquiry)lane_clear,
    .tp_dealloc = (destructor)lane_dealloc,
};

/* Source: the part of an iterator's `patches.dataloader.Info` that each batch asks for. */

typedef struct {
    PyObject_HEAD
    char alone, in_order;
    long long loader, epoch, fetched, round, last;
    PyObject *batch, *nonce, *pids, *method;
} Source;

static PyMemberDef source_members[] = {
    {"alone", T_BOOL, offsetof(Source, alone), 0, NULL},
    {"loader", T_LONGLONG, offsetof(Source, loader), 0, NULL},
    {"epoch", T_LONGLONG, offsetof(Source, epoch), 0, NULL},
    {"fetched", T_LONGLONG, offsetof(Source, fetched), 0, NULL},
    {"in_order", T_BOOL, offsetof(Source, in_order), 0, NULL},
    {"round", T_LONGLONG, offsetof(Source, round), 0, NULL},
    {"last", T_LONGLONG, offsetof(Source, last), 0, NULL},
    {"batch", T_OBJECT, offsetof(Source, batch), 0, NULL},
    {"nonce", T_OBJECT, offsetof(Source, nonce), 0, NULL},
    {"pids", T_OBJECT, offsetof(Source, pids), 0, NULL},
    {"method", T_OBJECT, offsetof(Source, method), 0, NULL},
    {NULL}};

static int
source_traverse(Source *self, visitproc visit, void *arg)
{
    Py_VISIT(self->batch);
    Py_VISIT(self->nonce);
    Py_VISIT(self->pids);
    Py_VISIT(self->method);
    return 0;
}

static int
source_clear(Source *self)
{
    Py_CLEAR(self->batch);
    Py_CLEAR(self->nonce);
    Py_CLEAR(self->pids);
    Py_CLEAR(self->method);
    return 0;
}

static void
source_dealloc(Source *self)
{
    PyObject_GC_UnTrack(self);
    source_clear(self);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

static PyTypeObject SourceType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "otel_dl.recording._native.SourceState",
    .tp_basicsize = sizeof(Source),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC,
    .tp_new = PyType_GenericNew,
    .tp_members = source_members,
    .tp_traverse = (traverseproc)source_traverse,
    .tp_clear = (inquiry)source_clear,
    .tp_dealloc = (destructor)source_dealloc,
};

/* FastPath: the thread whose steps are simply recorded, and how long they may be. One a run. */

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

/* The status page is mapped at this address; 0: there is none. */
static PyObject *
fastpath_map(FastPath *self, PyObject *number)
{
    unsigned long long address = PyLong_AsUnsignedLongLong(number);
    if (PyErr_Occurred())
        return NULL;
    self->step_word = in_page(address, STEP);
    self->phase_block = in_page(address, PHASES);
    self->batch_block = in_page(address, BATCH);
    Py_RETURN_NONE;
}

/* In the page: this batch is read, by whom the page is, since `start`; which samples, nobody knows here. */
static inline void
page_batch(FastPath *self, int64_t epoch, int64_t index, int64_t start)
{
    if (self->batch_block != NULL)
        BLOCK(self->batch_block, NOTHING, epoch, index, start, 0, FORM_NONE);
}

/* In the page: the outermost phase is of this kind since `instant`; 0: none is open since then. */
static inline void
page_phase(FastPath *self, int64_t kind, int64_t instant)
{
    if (self->phase_block != NULL)
        BLOCK(self->phase_block, 0, kind, instant);
}

static PyObject *
fastpath_follow(FastPath *self, PyObject *lane)
{
    if (lane != Py_None && !PyObject_TypeCheck(lane, &LaneType)) {
        PyErr_SetString(PyExc_TypeError, "a LaneState or None");
        return NULL;
    }
    Py_INCREF(lane);
    Py_XSETREF(self->lane, lane);
    self->thread = PyThreadState_GetID(PyThreadState_Get());
    Py_RETURN_NONE;
}

static int
fastpath_init(FastPath *self, PyObject *args, PyObject *kwargs)
{
    static char *keywords[] = {"variable", "capacity", NULL};
    PyObject *variable;
    Py_ssize_t capacity;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "On", keywords, &variable, &capacity))
        return -1;
    if (variable != Py_None && !PyContextVar_CheckExact(variable)) {
        PyErr_SetString(PyExc_TypeError, "variable: a ContextVar or None");
        return -1;
    }
    Py_INCREF(variable);
    Py_XSETREF(self->variable, variable);
    self->capacity = capacity;
    self->limit = -1;
    Py_INCREF(Py_None);
    Py_XSETREF(self->lane, Py_None);
    return 0;
}

static PyMemberDef fastpath_members[] = {
    {"lane", T_OBJECT, offsetof(FastPath, lane), READONLY, NULL},
    {"durations", T_OBJECT, offsetof(FastPath, durations), 0, NULL},
    {"limit", T_LONGLONG, offsetof(FastPath, limit), 0, NULL},
    {"attention", T_LONGLONG, offsetof(FastPath, attention), 0, NULL},
    {"hold", T_OBJECT, offsetof(FastPath, hold), 0, NULL},
    {"on_phase", T_OBJECT, offsetof(FastPath, on_phase), 0, NULL},
    {"on_step", T_OBJECT, offsetof(FastPath, on_step), 0, NULL},
    {"held_in", T_LONGLONG, offsetof(FastPath, held_in), 0, NULL},
    {"held_out", T_LONGLONG, offsetof(FastPath, held_out), 0, NULL},
    {"held_most", T_LONGLONG, offsetof(FastPath, held_most), 0, NULL},
    {"not_held", T_LONGLONG, offsetof(FastPath, not_held), 0, NULL},
    {NULL}};

static PyMethodDef fastpath_methods[] = {{"follow", (PyCFunction)fastpath_follow, METH_O, NULL},
                                        {"map_page", (PyCFunction)fastpath_map, METH_O, NULL},
                                        {NULL}};

static int
fastpath_traverse(FastPath *self, visitproc visit, void *arg)
{
    Py_VISIT(self->lane);
    Py_VISIT(self->variable);
    Py_VISIT(self->durations);
    Py_VISIT(self->hold);
    Py_VISIT(self->on_phase);
    Py_VISIT(self->on_step);
    return 0;
}

static int
fastpath_clear(FastPath *self)
{
    Py_CLEAR(self->lane);
    Py_CLEAR(self->variable);
    Py_CLEAR(self->durations);
    Py_CLEAR(self->hold);
    Py_CLEAR(self->on_phase);
    Py_CLEAR(self->on_step);
    return 0;
}

static void
fastpath_dealloc(FastPath *self)
{
    PyObject_GC_UnTrack(self);
    fastpath_clear(self);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

static PyTypeObject FastPathType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "otel_dl.recording._native.FastPath",
    .tp_basicsize = sizeof(FastPath),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .tp_new = PyType_GenericNew,
    .tp_init = (initproc)fastpath_init,
    .tp_members = fastpath_members,
    .tp_methods = fastpath_methods,
    .tp_traverse = (traverseproc)fastpath_traverse,
    .tp_clear = (inquiry)fastpath_clear,
    .tp_dealloc = (destructor)fastpath_dealloc,
};

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

/* Adds (kind, start, end, None, batch) to the step; -1 with an exception set. */
static int
add_record(Step *step, PyObject *kind, long long start, long long end, PyObject *batch)
{
    PyObject *record = PyTuple_New(5);
    if (record == NULL)
        return -1;
    PyObject *first = PyLong_FromLongLong(start), *last = PyLong_FromLongLong(end);
    Py_INCREF(kind);
    Py_INCREF(Py_None);
    Py_INCREF(batch);
    PyTuple_SET_ITEM(record, 0, kind);
    PyTuple_SET_ITEM(record, 1, first);
    PyTuple_SET_ITEM(record, 2, last);
    PyTuple_SET_ITEM(record, 3, Py_None);
    PyTuple_SET_ITEM(record, 4, batch);
    int failed = first == NULL || last == NULL || PyList_Append(step->records, record) < 0;
    Py_DECREF(record);
    return failed ? -1 : 0;
}

/* Hook: an attribute's stand-in, which binds as a function does. */

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

/* Takes the exception that is set, as one object whose traceback is its own. */
static PyObject *
take_exception(void)
{
#if PY_VERSION_HEX >= 0x030C0000
    return PyErr_GetRaisedException();
#else
    PyObject *type, *value, *traceback;
    PyErr_Fetch(&type, &value, &traceback);
    PyErr_NormalizeException(&type, &value, &traceback);
    if (traceback != NULL)
        PyException_SetTraceback(value, traceback);
    Py_XDECREF(type);
    Py_XDECREF(traceback);
    return value;
#endif
}

static void
put_exception(PyObject *error)
{
#if PY_VERSION_HEX >= 0x030C0000
    PyErr_SetRaisedException(error);
#else
    PyObject *type = (PyObject *)Py_TYPE(error);
    Py_INCREF(type);
    PyErr_Restore(type, error, PyException_GetTraceback(error));
#endif
}

/* Our own exception is set: to `fault`, which may raise what a signal handler of the user's raised; -1 then. */
static int
own_fault(Hook *hook)
{
    PyObject *error = take_exception();
    PyObject *answer = PyObject_CallOneArg(hook->fault, error);
    Py_DECREF(error);
    if (answer == NULL)
        return -1;
    Py_DECREF(answer);
    return 0;
}

/* The call has failed with the exception that is set, and goes on to do so. */
static void
call_failed(Hook *hook, PyObject *kind, PyObject *subject, long long start)
{
    PyObject *error = take_exception();
    PyObject *reading = PyLong_FromLongLong(start);
    PyObject *answer = NULL;
    if (reading != NULL)
        answer = PyObject_CallFunctionObjArgs(hook->failed, kind, subject, reading, error, NULL);
    Py_XDECREF(reading);
    if (answer == NULL && own_fault(hook) < 0) { /* a signal handler of the user's raised meanwhile */
        PyObject *raised = take_exception();
        PyObject *context = PyException_GetContext(raised);
        if (context == NULL && raised != error)
            PyException_SetContext(raised, error);
        else
            Py_DECREF(error);
        Py_XDECREF(context);
        put_exception(raised);
        return;
    }
    Py_XDECREF(answer);
    put_exception(error);
}

/* The call has returned `result`, and is recorded by Python; the result, or NULL. */
static PyObject *
call_ended(Hook *hook, PyObject *kind, PyObject *subject, long long start, PyObject *result)
{
    PyObject *reading = PyLong_FromLongLong(start);
    PyObject *answer = NULL;
    if (reading != NULL)
        answer = PyObject_CallFunctionObjArgs(hook->ended, kind, subject, reading, NULL);
    Py_XDECREF(reading);
    if (answer == NULL && own_fault(hook) < 0)
        Py_CLEAR(result);
    Py_XDECREF(answer);
    return result;
}

/* `result` of a call that began at `start` as an ordinary phase of `step` (a reference of ours, given back here). */
static PyObject *
phase_over(Hook *hook, Lane *lane, Step *step, PyObject *kind, PyObject *subject, long long start, PyObject *result)
{
    if (result == NULL) {
        call_failed(hook, kind, subject, start);
    } else if (lane->step == (PyObject *)step && step->records != NULL && PyList_CheckExact(step->records)
               && PyList_GET_SIZE(step->records) < hook->fast->capacity) {
        long long end = now();
        lane->kinds = 0;
        if (hook->optimizes)
            step->stepped = 1;
        page_phase(hook->fast, 0, end);
        if ((add_record(step, kind, start, end, Py_None) < 0 || observe(hook->fast->on_phase, kind, 0, end) < 0)
            && own_fault(hook) < 0)
            Py_CLEAR(result);
    } else {
        result = call_ended(hook, kind, subject, start, result);
    }
    Py_DECREF(step);
    Py_DECREF(lane);
    return result;
}

/* The call of an ordinary phase of `step` (references to lane and step of ours, given back here). */
static PyObject *
call_phase(Hook *hook, Lane *lane, Step *step, PyObject *kind, long kinds, PyObject *subject, PyObject *const *args,
           size_t nargsf, PyObject *kwnames)
{
    lane->kinds = kinds;
    long long start = now();
    page_phase(hook->fast, kinds, start);
    if (observe(hook->fast->on_phase, kind, 1, start) < 0) {
        int raised = own_fault(hook);
        Py_DECREF(step);
        Py_DECREF(lane);
        return raised < 0 ? NULL : PyObject_Vectorcall(hook->original, args, nargsf, kwnames);
    }
    PyObject *result = PyObject_Vectorcall(hook->original, args, nargsf, kwnames);
    return phase_over(hook, lane, step, kind, subject, start, result);
}

static PyObject *
phase_call(Hook *hook, PyObject *const *args, size_t nargsf, PyObject *kwnames)
{
    Lane *lane = followed(hook->fast);
    Step *step = lane == NULL ? NULL : ordinary(hook->fast, lane);
    if (step == NULL)
        return PyObject_Vectorcall(hook->recorded, args, nargsf, kwnames);
    PyObject *subject = PyVectorcall_NARGS(nargsf) > 0 ? args[0] : Py_None;
    Py_INCREF(lane);
    Py_INCREF(step);
    return call_phase(hook, lane, step, hook->kind, hook->kinds, subject, args, nargsf, kwnames);
}

/* An attribute could not be had: whether it is just missing, which is cleared. What a signal handler raised meanwhile
 * stays, and is the caller's. */
static int
no_attribute(void)
{
    if (!PyErr_ExceptionMatches(PyExc_AttributeError))
        return 0;
    PyErr_Clear();
    return 1;
}

/* Whether an attribute is true, or has entries; -1 with an exception set. */
static int
is_true(PyObject *module, PyObject *name)
{
    PyObject *value = PyObject_GetAttr(module, name);
    if (value == NULL)
        return -1;
    int answer = PyObject_IsTrue(value);
    Py_DECREF(value);
    return answer;
}

/* Which kind of forward a call of `module` is (borrowed), NULL with an exception set. */
static PyObject *
forward_kind(Hook *hook, PyObject *module)
{
    int training = is_true(module, str_training);
    if (training < 0)
        return NULL;
    if (training) {
        PyObject *answer = PyObject_CallNoArgs(hook->is_grad_enabled);
        if (answer == NULL)
            return NULL;
        training = PyObject_IsTrue(answer);
        Py_DECREF(answer);
        if (training < 0)
            return NULL;
    }
    if (!training)
        return hook->eval_kind;
    int some = is_true(module, str_modules);
    if (some == 0)
        some = is_true(module, str_parameters);
    return some < 0 ? NULL : some ? hook->kind : hook->neutral_kind;
}

static PyObject *
forward_call(Hook *hook, PyObject *const *args, size_t nargsf, PyObject *kwnames)
{
    Lane *lane = followed(hook->fast);
    if (lane == NULL || PyVectorcall_NARGS(nargsf) < 1)
        return PyObject_Vectorcall(hook->recorded, args, nargsf, kwnames);
    PyObject *module = args[0];
    if (lane->kinds & FORWARD) {
        /* A submodule's call, the hot one (hundreds a step). Where torch's own function stands, its two lines are done
         * here: one frame less (torch/nn/modules/module.py::_wrapped_call_impl, 2.4 to 2.15). */
        if (hook->own) {
            PyObject *compiled = PyObject_GetAttr(module, str_compiled_call_impl);
            if (compiled == Py_None) {
                Py_DECREF(compiled);
                return PyObject_VectorcallMethod(str_call_impl, args, nargsf, kwnames);
            }
            if (compiled == NULL && !no_attribute())
                return NULL;
            Py_XDECREF(compiled);
        }
        return PyObject_Vectorcall(hook->original, args, nargsf, kwnames);
    }
    Step *step = ordinary(hook->fast, lane);
    if (step == NULL)
        return PyObject_Vectorcall(hook->recorded, args, nargsf, kwnames);
    Py_INCREF(lane);
    Py_INCREF(step);
    PyObject *kind = forward_kind(hook, module);
    /* Attributes of a module may be anything, and looking at them may have done anything. */
    if (kind == NULL || lane->step != (PyObject *)step || lane->kinds) {
        Py_DECREF(step);
        Py_DECREF(lane);
        if (kind == NULL && !no_attribute())
            return NULL;
        return PyObject_Vectorcall(hook->recorded, args, nargsf, kwnames);
    }
    return call_phase(hook, lane, step, kind, PyLong_AsLong(kind), module, args, nargsf, kwnames);
}

/* (loader, epoch, place, nonce, round, worker, pid, start method): a `records.Batch`. */
static PyObject *
batch_tuple(Source *source, long long place, PyObject *nonce, long long round, PyObject *worker, PyObject *pid,
            PyObject *method)
{
    PyObject *batch = PyTuple_New(8);
    if (batch == NULL)
        return NULL;
    PyObject *numbers[] = {PyLong_FromLongLong(source->loader), PyLong_FromLongLong(source->epoch),
                           PyLong_FromLongLong(place), PyLong_FromLongLong(round)};
    PyObject *others[] = {nonce, worker, pid, method};
    static const int places[] = {0, 1, 2, 4}, other_places[] = {3, 5, 6, 7};
    int failed = 0;
    for (int i = 0; i < 4; i++) {
        failed |= numbers[i] == NULL;
        PyTuple_SET_ITEM(batch, places[i], numbers[i]);
        Py_INCREF(others[i]);
        PyTuple_SET_ITEM(batch, other_places[i], others[i]);
    }
    if (failed)
        Py_CLEAR(batch);
    return batch;
}

/* The batch that the iterator returned. */
static PyObject *
batch_of(Source *source)
{
    if (source->alone)
        return batch_tuple(source, source->fetched++, empty_string, 0, Py_None, zero, empty_string);
    PyObject *batch = source->batch == NULL ? Py_None : source->batch;
    Py_INCREF(batch);
    return batch;
}

/* Nobody takes what `step` has recorded; -1 with an exception set. */
static int
empty(Step *step)
{
    if (PyList_SetSlice(step->records, 0, PyList_GET_SIZE(step->records), NULL) < 0)
        return -1;
    return PyList_SetSlice(step->collectives, 0, PyList_GET_SIZE(step->collectives), NULL);
}

/* The records of `step`, which ends, are held for other ranks (`recording/held.py::Held.recycled`), and the step has
 * none; -1 with an exception set. */
static int
hold(FastPath *fast, Step *step, long long end)
{
    Py_ssize_t count = PyList_GET_SIZE(step->records) + PyList_GET_SIZE(step->collectives);
    if (fast->held_in - fast->held_out + count > fast->held_most) {
        fast->not_held++;
        return empty(step);
    }
    PyObject *records = PyList_New(0), *collectives = PyList_New(0), *answer = NULL;
    PyObject *held = records == NULL || collectives == NULL
                         ? NULL
                         : Py_BuildValue("(LLLLOO)", step->number, step->start, end, step->dropped, step->records,
                                         step->collectives);
    if (held != NULL)
        answer = PyObject_CallOneArg(fast->hold, held);
    Py_XDECREF(held);
    if (answer == NULL) {
        Py_XDECREF(records);
        Py_XDECREF(collectives);
        return -1;
    }
    Py_DECREF(answer);
    fast->held_in += count;
    Py_SETREF(step->records, records);
    Py_SETREF(step->collectives, collectives);
    return 0;
}

/* The ordinary step that ends here becomes the next one (`Lane.begin_next` says when); -1 with an exception set. */
static int
again(FastPath *fast, Step *step, long long start)
{
    if (fast->durations == NULL || !PyList_CheckExact(fast->durations)) {
        PyErr_SetString(PyExc_TypeError, "FastPath.durations: a list");
        return -1;
    }
    PyObject *duration = PyLong_FromLongLong(start - step->start);
    if (duration == NULL)
        return -1;
    int failed = PyList_Append(fast->durations, duration);
    Py_DECREF(duration);
    if (failed < 0)
        return -1;
    if (step->collectives == NULL || !PyList_CheckExact(step->collectives)) {
        PyErr_SetString(PyExc_TypeError, "Step.collectives: a list");
        return -1;
    }
    if (fast->hold == NULL || fast->hold == Py_None)
        failed = empty(step);
    else
        failed = hold(fast, step, start);
    step->number++;
    if (fast->step_word != NULL)
        *fast->step_word = step->number;
    step->start = start;
    step->stepped = 0;
    step->dropped = step->segment = step->seen = 0;
    if (failed < 0 || observe(fast->on_step, zero, 0, start) < 0)
        return -1;
    return observe(fast->on_step, zero, 1, start);
}

static PyObject *
next_call(Hook *hook, PyObject *const *args, size_t nargsf, PyObject *kwnames)
{
    FastPath *fast = hook->fast;
    Lane *lane = followed(fast);
    Step *step = lane == NULL ? NULL : ordinary(fast, lane);
    if (step == NULL || !step->stepped || !step->plain || step->number + 1 >= fast->attention
        || PyVectorcall_NARGS(nargsf) != 1 || kwnames != NULL)
        return PyObject_Vectorcall(hook->recorded, args, nargsf, kwnames);
    Py_INCREF(lane);
    Py_INCREF(step);
    PyObject *iterator = args[0], *result = NULL;
    PyObject *source = PyObject_GetAttr(iterator, str_source);
    if (source == NULL && !no_attribute())
        goto done;
    long long start = now();
    if (source == NULL || !PyObject_TypeCheck(source, &SourceType) || start - step->start > fast->limit
        || lane->step != (PyObject *)step) {
        result = PyObject_Vectorcall(hook->recorded, args, nargsf, kwnames);
        goto done;
    }
    if (again(fast, step, start) < 0 && own_fault(hook) < 0)
        goto done;
    if (!((Source *)source)->alone) {
        Py_INCREF(Py_None);
        Py_XSETREF(((Source *)source)->batch, Py_None);
    }
    lane->kinds = NEXT;
    page_phase(fast, NEXT, start);
    if (((Source *)source)->alone)
        page_batch(fast, ((Source *)source)->epoch, ((Source *)source)->fetched, start);
    if (observe(fast->on_phase, hook->kind, 1, start) < 0) {
        if (own_fault(hook) == 0)
            result = PyObject_Vectorcall(hook->original, args, nargsf, NULL);
        goto done;
    }
    result = PyObject_Vectorcall(hook->original, args, nargsf, NULL);
    if (result == NULL) {
        call_failed(hook, hook->kind, iterator, start);
    } else if (lane->step == (PyObject *)step && step->records != NULL && PyList_CheckExact(step->records)) {
        PyObject *batch = batch_of((Source *)source);
        long long end = now();
        lane->kinds = 0;
        page_phase(fast, 0, end);
        if ((batch == NULL || add_record(step, hook->kind, start, end, batch) < 0
             || observe(fast->on_phase, hook->kind, 0, end) < 0)
            && own_fault(hook) < 0)
            Py_CLEAR(result);
        Py_XDECREF(batch);
    } else {
        result = call_ended(hook, hook->kind, iterator, start, result);
    }
done:
    Py_DECREF(step);
    Py_DECREF(lane);
    Py_XDECREF(source);
    return result;
}

/* `_process_data(iterator, data, worker)` of torch 2.8 and newer: notes whose the batch is that `next()` returns. */
static PyObject *
returned_call(Hook *hook, PyObject *const *args, size_t nargsf, PyObject *kwnames)
{
    if (PyVectorcall_NARGS(nargsf) >= 3 && PyLong_Check(args[2])) { /* torchdata's has a fourth */
        PyObject *found = PyObject_GetAttr(args[0], str_source);
        if (found != NULL && PyObject_TypeCheck(found, &SourceType)) {
            Source *source = (Source *)found;
            Py_ssize_t number = PyLong_AsSsize_t(args[2]);
            if (source->pids != NULL && PyTuple_CheckExact(source->pids) && number >= 0
                && number < PyTuple_GET_SIZE(source->pids) && source->nonce != NULL && source->method != NULL) {
                long long place = source->last;
                if (source->in_order) {
                    PyObject *received = PyObject_GetAttr(args[0], str_rcvd_idx);
                    place = received == NULL ? -1 : PyLong_AsLongLong(received) - 1; /* its caller has counted it */
                    Py_XDECREF(received);
                }
                if (!PyErr_Occurred()) {
                    PyObject *batch = batch_tuple(source, place, source->nonce, source->round, args[2],
                                                  PyTuple_GET_ITEM(source->pids, number), source->method);
                    Py_XSETREF(source->batch, batch);
                }
            }
        }
        Py_XDECREF(found);
        if (PyErr_Occurred() && own_fault(hook) < 0)
            return NULL;
    }
    return PyObject_Vectorcall(hook->original, args, nargsf, kwnames);
}

/* Worker: the part of `workers.loop.Worker` that each fetch changes, and its status page and ring. */

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

static PyMemberDef worker_members[] = {
    {"fetching", T_BOOL, offsetof(Worker, fetching), 0, NULL},
    {"asked", T_BOOL, offsetof(Worker, asked), 0, NULL},
    {"round", T_LONGLONG, offsetof(Worker, round), 0, NULL},
    {"index", T_LONGLONG, offsetof(Worker, index), 0, NULL},
    {"start", T_LONGLONG, offsetof(Worker, start), 0, NULL},
    {"free", T_LONGLONG, offsetof(Worker, room), 0, NULL},
    {"span_limit", T_LONGLONG, offsetof(Worker, span_limit), 0, NULL},
    {"dropped", T_LONGLONG, offsetof(Worker, dropped), 0, NULL},
    {"fetches", T_LONGLONG, offsetof(Worker, fetches), 0, NULL},
    {"mean", T_LONGLONG, offsetof(Worker, mean), 0, NULL},
    {"entries_count", T_LONGLONG, offsetof(Worker, entries_count), 0, NULL},
    {"samples", T_OBJECT, offsetof(Worker, samples), 0, NULL},
    {"span", T_OBJECT, offsetof(Worker, span), 0, NULL},
    {"attached", T_OBJECT, offsetof(Worker, attached), 0, NULL},
    {"entries", T_OBJECT, offsetof(Worker, entries), 0, NULL},
    {NULL}};

/* map_page(variable, address, began): the OpenTelemetry context's variable; where the status page with the ring behind
 * it is mapped; when the worker began. */
static PyObject *
worker_map(Worker *self, PyObject *args)
{
    PyObject *variable;
    unsigned long long address;
    long long began;
    if (!PyArg_ParseTuple(args, "OKL", &variable, &address, &began))
        return NULL;
    if (!PyContextVar_CheckExact(variable) || !address) {
        PyErr_SetString(PyExc_TypeError, "a ContextVar and an address");
        return NULL;
    }
    Py_INCREF(variable);
    Py_XSETREF(self->variable, variable);
    self->phase = in_page(address, PHASES);
    self->batch = in_page(address, BATCH);
    self->sample_words = in_page(address, SAMPLES);
    self->done = in_page(address, DONE);
    self->ring = in_page(address, SIZE);
    self->began = began;
    self->pid = (long long)getpid();
    Py_RETURN_NONE;
}

static PyMethodDef worker_methods[] = {{"map_page", (PyCFunction)worker_map, METH_VARARGS, NULL}, {NULL}};

static int
worker_traverse(Worker *self, visitproc visit, void *arg)
{
    Py_VISIT(self->samples);
    Py_VISIT(self->span);
    Py_VISIT(self->attached);
    Py_VISIT(self->entries);
    Py_VISIT(self->variable);
    return 0;
}

static int
worker_clear(Worker *self)
{
    Py_CLEAR(self->samples);
    Py_CLEAR(self->span);
    Py_CLEAR(self->attached);
    Py_CLEAR(self->entries);
    Py_CLEAR(self->variable);
    return 0;
}

static void
worker_dealloc(Worker *self)
{
    PyObject_GC_UnTrack(self);
    worker_clear(self);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

static PyTypeObject WorkerType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "otel_dl.recording._native.WorkerState",
    .tp_basicsize = sizeof(Worker),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC,
    .tp_new = PyType_GenericNew,
    .tp_members = worker_members,
    .tp_methods = worker_methods,
    .tp_traverse = (traverseproc)worker_traverse,
    .tp_clear = (inquiry)worker_clear,
    .tp_dealloc = (destructor)worker_dealloc,
};

/* Whether the span that stands for the fetch is in the context, and nobody has asked for its ids: then it may stand for
 * the next one as well. */
static int
worker_span_unasked(Worker *worker)
{
    if (worker->asked || worker->span == NULL || worker->span == Py_None || worker->variable == NULL)
        return 0;
    PyObject *context = NULL;
    if (PyContextVar_Get(worker->variable, NULL, &context) < 0) {
        PyErr_Clear();
        return 0;
    }
    int same = context != NULL && context == worker->attached;
    Py_XDECREF(context);
    return same;
}

/* The Adler-32 of zlib (RFC 1950), of less than 5,552 bytes: the sums can't overflow before then. */
static uint32_t
adler32(const unsigned char *data, size_t size)
{
    uint32_t low = 1, high = 0;
    for (size_t i = 0; i < size; i++) {
        low += data[i];
        high += low;
    }
    return (high % 65521) << 16 | low % 65521;
}

/* Writes the indices of the samples, a list of them or one; -1 where they are something else. */
static int64_t
worker_samples(Worker *worker, PyObject *samples)
{
    PyObject **items = &samples;
    Py_ssize_t count = 1;
    if (PyList_CheckExact(samples)) {
        items = ((PyListObject *)samples)->ob_item;
        count = PyList_GET_SIZE(samples);
    }
    if (count < 1 || count > SAMPLES_MOST)
        return -1;
    for (Py_ssize_t i = 0; i < count; i++) {
        int overflow = 1;
        int64_t value = PyLong_CheckExact(items[i]) ? PyLong_AsLongLongAndOverflow(items[i], &overflow) : 0;
        if (overflow)
            return -1;
        worker->sample_words[i] = value;
    }
    return count;
}

/* torch's loop was given `message`; whether that was an ordinary fetch that begins. */
static int
worker_received(Worker *worker, PyObject *message)
{
    if ((long long)getpid() != worker->pid || worker->fetching || worker->phase == NULL || !PyTuple_CheckExact(message) || PyTuple_GET_SIZE(message) != 2
        || !PyLong_CheckExact(PyTuple_GET_ITEM(message, 0)) || !worker_span_unasked(worker))
        return 0;
    int overflow;
    int64_t index = PyLong_AsLongLongAndOverflow(PyTuple_GET_ITEM(message, 0), &overflow);
    if (overflow)
        return 0;
    int64_t start = now();
    PyObject *samples = PyTuple_GET_ITEM(message, 1);
    int64_t count = worker_samples(worker, samples);
    if (count < 0)
        return 0;
    int64_t sum = adler32((const unsigned char *)worker->sample_words, (size_t)count * 8);
    BLOCK(worker->batch, sum, worker->round, index, start, count, FORM_INTEGERS);
    BLOCK(worker->phase, 0, FETCH, start);
    worker->index = index;
    worker->start = start;
    worker->room = worker->span_limit;
    worker->dropped = 0;
    worker->fetching = 1;
    Py_INCREF(samples);
    Py_XSETREF(worker->samples, samples);
    return 1;
}

/* torch's loop is about to hand `message` over; whether that is an ordinary fetch that ends. */
static int
worker_answers(Worker *worker, PyObject *message)
{
    if (!worker->fetching || worker->phase == NULL || !PyTuple_CheckExact(message) || PyTuple_GET_SIZE(message) != 2
        || !PyLong_CheckExact(PyTuple_GET_ITEM(message, 0)) || worker->dropped || worker->room != worker->span_limit
        || !worker_span_unasked(worker))
        return 0;
    int overflow;
    if (PyLong_AsLongLongAndOverflow(PyTuple_GET_ITEM(message, 0), &overflow) != worker->index || overflow)
        return 0;
    const char *kind = Py_TYPE(PyTuple_GET_ITEM(message, 1))->tp_name;
    if (strcmp(kind, "ExceptionWrapper") == 0 || strcmp(kind, "_IterableDatasetStopIteration") == 0)
        return 0;
    if (worker->entries != NULL && PyDict_Check(worker->entries)
        && PyDict_Size(worker->entries) != worker->entries_count)
        return 0;
    if ((long long)getpid() != worker->pid)
        return 0;
    int64_t end = now(), duration = end - worker->start;
    if (worker->fetches >= WARM && duration > SLOW * worker->mean)
        return 0;
    worker->fetches++;
    int64_t among = worker->fetches < WARM ? worker->fetches : WARM, change = duration - worker->mean;
    worker->mean += change >= 0 ? change / among : -((-change + among - 1) / among); /* Python's //: downwards */
    int64_t *head = worker->ring + RING_HEAD / 8, *done = worker->done, number = *head;
    BLOCK(worker->ring + RING_FIRST / 8 + 6 * (number % RING_SLOTS), 0, worker->round, worker->index, worker->start, end,
          number);
    __atomic_store_n(head, number + 1, __ATOMIC_RELEASE);
    int64_t fetches = done[3] + 1, busy = done[4] + duration, since = fetches > 1 ? done[2] : worker->began,
            idle = done[5] + (worker->start - since);
    BLOCK(done, 0, worker->round, worker->index, end, fetches, busy, idle);
    BLOCK(worker->phase, 0, 0, end);
    worker->fetching = 0;
    Py_INCREF(Py_None);
    Py_XSETREF(worker->samples, Py_None);
    return 1;
}

/* `get` of a worker's index queue, and `put` of its data queue: (worker, original, in Python). */

typedef struct {
    PyObject_HEAD
    vectorcallfunc vectorcall;
    Worker *worker;
    PyObject *original; /* the queue's own */
    PyObject *noticed;  /* (message): tells the worker in Python */
} Queue;

static PyObject *
get_call(Queue *queue, PyObject *const *args, size_t nargsf, PyObject *kwnames)
{
    PyObject *message = PyObject_Vectorcall(queue->original, args, nargsf, kwnames);
    if (message != NULL && !worker_received(queue->worker, message)) {
        PyObject *answer = PyObject_CallOneArg(queue->noticed, message);
        if (answer == NULL)
            Py_CLEAR(message);
        Py_XDECREF(answer);
    }
    return message;
}

static PyObject *
put_call(Queue *queue, PyObject *const *args, size_t nargsf, PyObject *kwnames)
{
    if (PyVectorcall_NARGS(nargsf) > 0 && !worker_answers(queue->worker, args[0])) {
        PyObject *answer = PyObject_CallOneArg(queue->noticed, args[0]);
        if (answer == NULL)
            return NULL;
        Py_DECREF(answer);
    }
    return PyObject_Vectorcall(queue->original, args, nargsf, kwnames);
}

static int
queue_init(Queue *self, PyObject *args, PyObject *kwargs, vectorcallfunc call)
{
    static char *keywords[] = {"worker", "original", "noticed", NULL};
    PyObject *worker, *original, *noticed;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!OO", keywords, &WorkerType, &worker, &original, &noticed))
        return -1;
    Py_INCREF(worker);
    Py_XSETREF(self->worker, (Worker *)worker);
    Py_INCREF(original);
    Py_XSETREF(self->original, original);
    Py_INCREF(noticed);
    Py_XSETREF(self->noticed, noticed);
    self->vectorcall = call;
    return 0;
}

static int
get_init(PyObject *self, PyObject *args, PyObject *kwargs)
{
    return queue_init((Queue *)self, args, kwargs, (vectorcallfunc)get_call);
}

static int
put_init(PyObject *self, PyObject *args, PyObject *kwargs)
{
    return queue_init((Queue *)self, args, kwargs, (vectorcallfunc)put_call);
}

/* Before __init__, and of one whose __init__ failed. */
static PyObject *
not_made(PyObject *self, PyObject *const *args, size_t nargsf, PyObject *kwnames)
{
    PyErr_SetString(PyExc_TypeError, "a hook that was not initialised");
    return NULL;
}

static PyObject *
queue_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    Queue *self = (Queue *)type->tp_alloc(type, 0);
    if (self != NULL)
        self->vectorcall = not_made;
    return (PyObject *)self;
}

static int
queue_traverse(Queue *self, visitproc visit, void *arg)
{
    Py_VISIT(self->worker);
    Py_VISIT(self->original);
    Py_VISIT(self->noticed);
    return 0;
}

static int
queue_clear(Queue *self)
{
    self->vectorcall = not_made;
    Py_CLEAR(self->worker);
    Py_CLEAR(self->original);
    Py_CLEAR(self->noticed);
    return 0;
}

static void
queue_dealloc(Queue *self)
{
    PyObject_GC_UnTrack(self);
    queue_clear(self);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

#define QUEUE(NAME, INIT)                                                                                             \
    {                                                                                                                 \
        PyVarObject_HEAD_INIT(NULL, 0).tp_name = "otel_dl.recording._native." NAME,                                   \
        .tp_basicsize = sizeof(Queue),                                                                                \
        .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL, .tp_new = queue_new,        \
        .tp_init = INIT, .tp_call = PyVectorcall_Call, .tp_vectorcall_offset = offsetof(Queue, vectorcall),           \
        .tp_traverse = (traverseproc)queue_traverse, .tp_clear = (inquiry)queue_clear,                                \
        .tp_dealloc = (destructor)queue_dealloc,                                                                      \
    }

static PyTypeObject GetType = QUEUE("Get", get_init);
static PyTypeObject PutType = QUEUE("Put", put_init);

static int
hook_init(Hook *self, PyObject *args, PyObject *kwargs, vectorcallfunc call)
{
    static char *keywords[] = {"fast", "kind", "original", "recorded", "ended", "failed", "fault",
                               "optimizes", "own", "is_grad_enabled", NULL};
    PyObject *fast, *kind, *original, *recorded, *ended, *failed, *fault, *is_grad_enabled = Py_None;
    int optimizes = 0, own = 0;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!O!OOOOO|$ppO", keywords, &FastPathType, &fast, &PyLong_Type,
                                     &kind, &original, &recorded, &ended, &failed, &fault, &optimizes, &own,
                                     &is_grad_enabled))
        return -1;
#define KEEP(field, value) (Py_INCREF(value), (self)->field = (void *)(value))
    if (self->fast != NULL) {
        PyErr_SetString(PyExc_TypeError, "it is made once");
        return -1;
    }
    self->kinds = PyLong_AsLong(kind);
    if (self->kinds == -1 && PyErr_Occurred())
        return -1;
    KEEP(fast, fast);
    KEEP(kind, kind);
    KEEP(original, original);
    KEEP(recorded, recorded);
    KEEP(ended, ended);
    KEEP(failed, failed);
    KEEP(fault, fault);
    KEEP(is_grad_enabled, is_grad_enabled);
#undef KEEP
    self->optimizes = (char)optimizes;
    self->own = (char)own;
    self->eval_kind = PyLong_FromLong(EVAL_FORWARD);
    self->neutral_kind = PyLong_FromLong(NEUTRAL_FORWARD);
    self->vectorcall = call;
    return self->eval_kind == NULL || self->neutral_kind == NULL ? -1 : 0;
}

static int
phase_init(PyObject *self, PyObject *args, PyObject *kwargs)
{
    return hook_init((Hook *)self, args, kwargs, (vectorcallfunc)phase_call);
}

static int
forward_init(PyObject *self, PyObject *args, PyObject *kwargs)
{
    return hook_init((Hook *)self, args, kwargs, (vectorcallfunc)forward_call);
}

static int
returned_init(PyObject *self, PyObject *args, PyObject *kwargs)
{
    return hook_init((Hook *)self, args, kwargs, (vectorcallfunc)returned_call);
}

static int
next_init(PyObject *self, PyObject *args, PyObject *kwargs)
{
    return hook_init((Hook *)self, args, kwargs, (vectorcallfunc)next_call);
}

static PyObject *
hook_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    Hook *self = (Hook *)type->tp_alloc(type, 0);
    if (self != NULL)
        self->vectorcall = not_made;
    return (PyObject *)self;
}

static PyObject *
hook_bind(PyObject *self, PyObject *instance, PyObject *owner)
{
    if (instance == NULL || instance == Py_None) {
        Py_INCREF(self);
        return self;
    }
    return PyMethod_New(self, instance);
}

/* Pickled by its name where that is where it stands, as a function is; else as what stood there, for what is patched
 * here is not patched where it is read again. */
static PyObject *
hook_reduce(Hook *self, PyObject *Py_UNUSED(ignored))
{
    PyObject *module = PyObject_GetAttrString((PyObject *)self, "__module__");
    PyObject *name = PyObject_GetAttrString((PyObject *)self, "__qualname__");
    PyObject *parts = name == NULL ? NULL : PyObject_CallMethod(name, "split", "s", ".");
    PyObject *found = module == NULL ? NULL : PyImport_GetModule(module);
    for (Py_ssize_t i = 0; found != NULL && parts != NULL && i < PyList_GET_SIZE(parts); i++)
        Py_SETREF(found, PyObject_GetAttr(found, PyList_GET_ITEM(parts, i)));
    int there = found == (PyObject *)self && parts != NULL;
    Py_XDECREF(module);
    Py_XDECREF(parts);
    Py_XDECREF(found);
    if (there)
        return name;
    Py_XDECREF(name);
    PyErr_Clear();
    return Py_BuildValue("O(O)", copy, self->original); /* a copy of a function is the function */
}

static PyObject *
hook_same(PyObject *self, PyObject *Py_UNUSED(ignored))
{
    Py_INCREF(self);
    return self;
}

static PyMethodDef hook_methods[] = {{"__reduce__", (PyCFunction)hook_reduce, METH_NOARGS, NULL},
                                     {"__copy__", hook_same, METH_NOARGS, NULL},
                                     {"__deepcopy__", hook_same, METH_O, NULL},
                                     {NULL}};

static PyGetSetDef hook_attributes[] = {{"__dict__", PyObject_GenericGetDict, PyObject_GenericSetDict, NULL, NULL},
                                        {NULL}};

static int
hook_traverse(Hook *self, visitproc visit, void *arg)
{
    Py_VISIT(self->dict);
    Py_VISIT(self->fast);
    Py_VISIT(self->original);
    Py_VISIT(self->recorded);
    Py_VISIT(self->ended);
    Py_VISIT(self->failed);
    Py_VISIT(self->fault);
    Py_VISIT(self->is_grad_enabled);
    return 0;
}

static int
hook_clear(Hook *self)
{
    self->vectorcall = not_made;
    Py_CLEAR(self->dict);
    Py_CLEAR(self->fast);
    Py_CLEAR(self->original);
    Py_CLEAR(self->recorded);
    Py_CLEAR(self->ended);
    Py_CLEAR(self->failed);
    Py_CLEAR(self->fault);
    Py_CLEAR(self->kind);
    Py_CLEAR(self->eval_kind);
    Py_CLEAR(self->neutral_kind);
    Py_CLEAR(self->is_grad_enabled);
    return 0;
}

static void
hook_dealloc(Hook *self)
{
    PyObject_GC_UnTrack(self);
    if (self->weakrefs != NULL)
        PyObject_ClearWeakRefs((PyObject *)self);
    hook_clear(self);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

#define HOOK(NAME, INIT)                                                                                              \
    {                                                                                                                 \
        PyVarObject_HEAD_INIT(NULL, 0).tp_name = "otel_dl.recording._native." NAME,                                   \
        .tp_basicsize = sizeof(Hook),                                                                                 \
        .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL                              \
                    | Py_TPFLAGS_METHOD_DESCRIPTOR,                                                                   \
        .tp_new = hook_new, .tp_init = INIT, .tp_call = PyVectorcall_Call,                                            \
        .tp_vectorcall_offset = offsetof(Hook, vectorcall), .tp_dictoffset = offsetof(Hook, dict),                    \
        .tp_weaklistoffset = offsetof(Hook, weakrefs), .tp_descr_get = hook_bind, .tp_methods = hook_methods,         \
        .tp_getset = hook_attributes, .tp_traverse = (traverseproc)hook_traverse,                                     \
        .tp_clear = (inquiry)hook_clear, .tp_dealloc = (destructor)hook_dealloc,                                      \
    }

static PyTypeObject PhaseType = HOOK("Phase", phase_init);
static PyTypeObject ForwardType = HOOK("Forward", forward_init);
static PyTypeObject NextType = HOOK("Next", next_init);
static PyTypeObject ReturnedType = HOOK("Returned", returned_init);

/* ---- Methods of a tensor. ---------------------------------------------------------------------------------------- */

/* What stands in the place of a method of torch.Tensor (`patches/synchronization/method.py` says the same in Python).
 * To whoever asks the class it is `original`, the identical object: `torch.Tensor.item`, its pickle, what torch hands to
 * a `__torch_function__`. A tensor on the CPU, which waits for nothing, gets it as well; any other one, and one that
 * overrides torch's functions, gets `waits`, a Python function, bound to it. */

enum { METHOD_READS, METHOD_MOVES, METHOD_ALWAYS };

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

/* Whether `tensor` is on the CPU and no override of torch's functions can see the question; what is no tensor is. -1 with
 * an exception set where what a signal handler raised is to go on. */
static int
tensor_on_cpu(PyObject *overrides, PyObject *is_cpu, PyObject *tensor)
{
    PyTypeObject *base = PyDescr_TYPE(is_cpu);
    if (!PyObject_TypeCheck(tensor, base))
        return 1;
    PyObject *yes = PyObject_CallOneArg(overrides, tensor);
    if (yes == Py_False)
        Py_SETREF(yes, Py_TYPE(is_cpu)->tp_descr_get(is_cpu, tensor, (PyObject *)Py_TYPE(tensor)));
    else
        Py_XSETREF(yes, NULL);
    if (yes == NULL && PyErr_Occurred()) {
        if (!PyErr_ExceptionMatches(PyExc_Exception))
            return -1;
        PyErr_Clear();
    }
    int found = yes == Py_True;
    Py_XDECREF(yes);
    return found;
}

/* Whether a name of a device, or the device itself, is that of the CPU (its class); -1 with an exception. */
static int
names_cpu(PyObject *cpu, PyObject *device)
{
    if (PyUnicode_Check(device))
        return PyUnicode_CompareWithASCIIString(device, "cpu") == 0;
    return Py_TYPE(device) == Py_TYPE(cpu) ? PyObject_RichCompareBool(device, cpu, Py_EQ) : 0; /* its name takes 0.4 us */
}

/* Whether `argument` of a call on a tensor that is, or is not, `on_cpu` names no other place than the tensor's; -1 with
 * an exception. */
static int
method_stays(Method *self, PyObject *argument, int on_cpu)
{
    PyTypeObject *type = Py_TYPE(argument);
    if (argument == Py_None || PyBool_Check(argument))
        return 1;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(self->harmless); i++) {
        if ((PyObject *)type == PyTuple_GET_ITEM(self->harmless, i))
            return 1;
    }
    if (PyUnicode_Check(argument) || type == Py_TYPE(self->cpu))
        return on_cpu ? names_cpu(self->cpu, argument) : 0;
    return on_cpu && PyObject_TypeCheck(argument, PyDescr_TYPE(self->is_cpu))
               ? tensor_on_cpu(self->overrides, self->is_cpu, argument)
               : 0;
}

/* Whether a call can't wait; -1 with an exception. Of `to` and `copy_` the arguments matter as well. */
static int
method_is_plain(Method *self, PyObject *tensor, PyObject *args, PyObject *kwargs)
{
    if (self->form == METHOD_ALWAYS)
        return 0;
    int on_cpu = tensor_on_cpu(self->overrides, self->is_cpu, tensor);
    if (self->form != METHOD_MOVES || on_cpu < 0)
        return on_cpu;
    int plain = 1;
    for (Py_ssize_t i = 0; plain == 1 && args != NULL && i < PyTuple_GET_SIZE(args); i++)
        plain = method_stays(self, PyTuple_GET_ITEM(args, i), on_cpu);
    Py_ssize_t at = 0;
    PyObject *value;
    while (plain == 1 && kwargs != NULL && PyDict_Next(kwargs, &at, NULL, &value))
        plain = method_stays(self, value, on_cpu);
    return plain;
}

static PyObject *
method_call(Method *self, PyObject *args, PyObject *kwargs)
{
    return PyObject_Call(self->waits, args, kwargs);
}

static PyObject *
method_bind(Method *self, PyObject *instance, PyObject *owner)
{
    descrgetfunc bind = Py_TYPE(self->original)->tp_descr_get;
    if (instance == NULL || instance == Py_None)
        return bind(self->original, NULL, owner);
    if (self->form == METHOD_READS) {
        int on_cpu = tensor_on_cpu(self->overrides, self->is_cpu, instance);
        if (on_cpu != 0)
            return on_cpu < 0 ? NULL : bind(self->original, instance, owner);
    }
    return PyMethod_New(self->waits, instance);
}

static PyObject *
method_getattro(PyObject *self, PyObject *name)
{
    /* Its name, its documentation, its signature. Its class it has of its own, so that whoever finds it in the class's
     * dict (torch.compile) binds it, and gets the original. */
    if (PyUnicode_CompareWithASCIIString(name, "__class__") == 0 || PyUnicode_CompareWithASCIIString(name, "__get__") == 0)
        return PyObject_GenericGetAttr(self, name);
    return PyObject_GetAttr(((Method *)self)->original, name);
}

static PyObject *
method_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *keywords[] = {"original", "waits", "form", "overrides", "is_cpu", "harmless", "cpu", NULL};
    PyObject *original, *waits, *overrides, *is_cpu, *harmless, *cpu;
    int form;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OOiOO!O!O", keywords, &original, &waits, &form, &overrides,
                                     &PyGetSetDescr_Type, &is_cpu, &PyTuple_Type, &harmless, &cpu))
        return NULL;
    if (Py_TYPE(original)->tp_descr_get == NULL || form < METHOD_READS || form > METHOD_ALWAYS) {
        PyErr_SetString(PyExc_TypeError, "it is no method, or none of these forms");
        return NULL;
    }
    Method *self = (Method *)type->tp_alloc(type, 0);
    if (self == NULL)
        return NULL;
    self->original = Py_NewRef(original);
    self->waits = Py_NewRef(waits);
    self->overrides = Py_NewRef(overrides);
    self->is_cpu = Py_NewRef(is_cpu);
    self->harmless = Py_NewRef(harmless);
    self->cpu = Py_NewRef(cpu);
    self->form = form;
    return (PyObject *)self;
}

static int
method_traverse(Method *self, visitproc visit, void *arg)
{
    Py_VISIT(self->original);
    Py_VISIT(self->waits);
    return 0;
}

static void
method_dealloc(Method *self)
{
    PyObject_GC_UnTrack(self);
    Py_XDECREF(self->original);
    Py_XDECREF(self->waits);
    Py_XDECREF(self->overrides);
    Py_XDECREF(self->is_cpu);
    Py_XDECREF(self->harmless);
    Py_XDECREF(self->cpu);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

static PyTypeObject MethodType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "otel_dl.recording._native.Method",
    .tp_basicsize = sizeof(Method),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .tp_new = method_new,
    .tp_call = (ternaryfunc)method_call,
    .tp_getattro = method_getattro,
    .tp_descr_get = (descrgetfunc)method_bind,
    .tp_traverse = (traverseproc)method_traverse,
    .tp_dealloc = (destructor)method_dealloc,
};

/* `x[index]` and `x[index] = value`. An entry `__getitem__` in a class's dict would fill `sq_item` as well, for ever: C
 * would take a tensor for a sequence. So no dict is changed but what C finds: the slots of the classes, and where a class
 * that is made later takes them from (`update_one_slot` in CPython's typeobject.c): what is behind TensorBase's
 * `__getitem__`, which stays the object that it was. TensorBase's own slots, which functorch reads, are left alone. */

static struct {
    PyTypeObject *base; /* torch._C.TensorBase */
    binaryfunc get;     /* its slots; they stay known, for a class that was not found when ours were taken back */
    objobjargproc set;
    Method *reads, *writes; /* NULL: nobody wants to know */
} subscripts;

static int
subscript_is_plain(PyObject *index)
{
    if (PyTuple_CheckExact(index)) {
        for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(index); i++) {
            PyObject *item = PyTuple_GET_ITEM(index, i);
            if (PyTuple_Check(item) || !subscript_is_plain(item))
                return 0;
        }
        return 1;
    }
    return PyLong_CheckExact(index) || PySlice_Check(index) || index == Py_None || index == Py_Ellipsis;
}

/* Whether the call can wait, or raised: then it was made, and this is its `result`. */
static int
subscript_waits(Method *method, PyObject *tensor, PyObject *index, PyObject *value, PyObject **result)
{
    if (method == NULL || subscript_is_plain(index))
        return 0;
    Py_INCREF(method);
    int on_cpu = tensor_on_cpu(method->overrides, method->is_cpu, tensor);
    *result = on_cpu == 0 ? PyObject_CallFunctionObjArgs(method->waits, tensor, index, value, NULL) : NULL;
    Py_DECREF(method);
    return on_cpu != 1;
}

static PyObject *
subscript_get(PyObject *tensor, PyObject *index)
{
    PyObject *result;
    return subscript_waits(subscripts.reads, tensor, index, NULL, &result) ? result : subscripts.get(tensor, index);
}

static int
subscript_set(PyObject *tensor, PyObject *index, PyObject *value) /* NULL: it is deleted */
{
    PyObject *result;
    if (value == NULL || !subscript_waits(subscripts.writes, tensor, index, value, &result))
        return subscripts.set(tensor, index, value);
    Py_XDECREF(result);
    return result == NULL ? -1 : 0;
}

/* subscript(tensor, index[, value]): torch's own. */
static PyObject *
subscript(PyObject *self, PyObject *args)
{
    PyObject *tensor, *index, *value = NULL;
    if (!PyArg_ParseTuple(args, "OO|O", &tensor, &index, &value))
        return NULL;
    if (subscripts.base == NULL || !PyObject_TypeCheck(tensor, subscripts.base)) {
        PyErr_SetString(PyExc_TypeError, "it is no tensor");
        return NULL;
    }
    if (value == NULL)
        return subscripts.get(tensor, index);
    return subscripts.set(tensor, index, value) < 0 ? NULL : Py_NewRef(Py_None);
}

#define SWAP(place, theirs, ours, in)                                                                                  \
    if ((place) == ((in) ? (theirs) : (ours)))                                                                         \
        (place) = (in) ? (ours) : (theirs);

/* In the subclasses of `type`, and theirs. A class that has functions of its own keeps them. */
static int
subscript_swap_slots(PyTypeObject *type, int in)
{
    PyObject *classes = PyObject_CallMethod((PyObject *)&PyType_Type, "__subclasses__", "O", type);
    int failed = classes == NULL;
    for (Py_ssize_t i = 0; !failed && i < PyList_GET_SIZE(classes); i++) {
        PyTypeObject *each = (PyTypeObject *)PyList_GET_ITEM(classes, i);
        if (PyType_HasFeature(each, Py_TPFLAGS_HEAPTYPE) && each->tp_as_mapping != NULL) {
            SWAP(each->tp_as_mapping->mp_subscript, subscripts.get, subscript_get, in)
            SWAP(each->tp_as_mapping->mp_ass_subscript, subscripts.set, subscript_set, in)
        }
        failed = subscript_swap_slots(each, in) < 0;
    }
    Py_XDECREF(classes);
    return failed ? -1 : 0;
}

static int
subscript_swap(int in)
{
    static const char *const names[] = {"__getitem__", "__setitem__", "__delitem__"};
    for (int i = 0; i < 3; i++) {
        PyObject *found = PyObject_GetAttrString((PyObject *)subscripts.base, names[i]);
        if (found == NULL)
            return -1;
        if (Py_TYPE(found) == &PyWrapperDescr_Type && PyDescr_TYPE(found) == subscripts.base) {
            SWAP(((PyWrapperDescrObject *)found)->d_wrapped, i == 0 ? (void *)subscripts.get : (void *)subscripts.set,
                 i == 0 ? (void *)subscript_get : (void *)subscript_set, in)
        }
        Py_DECREF(found);
    }
    return subscript_swap_slots(subscripts.base, in);
}
#undef SWAP

/* swap_subscripts(reads, writes): they decide, and their `waits` is called, from now on; without, torch's own are put
 * back, wherever ours are. */
static PyObject *
swap_subscripts(PyObject *self, PyObject *args)
{
    Method *reads = NULL, *writes = NULL;
    if (!PyArg_ParseTuple(args, "|O!O!", &MethodType, &reads, &MethodType, &writes))
        return NULL;
    int in = reads != NULL && writes != NULL;
    if (in) {
        PyTypeObject *base = PyDescr_TYPE(reads->is_cpu);
        PyMappingMethods *mapping = base->tp_as_mapping;
        if (mapping == NULL || mapping->mp_subscript == NULL || mapping->mp_ass_subscript == NULL) {
            PyErr_SetString(PyExc_TypeError, "a tensor has no slots for its indices");
            return NULL;
        }
        subscripts.base = base;
        subscripts.get = mapping->mp_subscript;
        subscripts.set = mapping->mp_ass_subscript;
    }
    Py_XINCREF(reads);
    Py_XINCREF(writes);
    Py_XSETREF(subscripts.reads, reads);
    Py_XSETREF(subscripts.writes, writes);
    if (subscripts.base != NULL && subscript_swap(in) < 0)
        return NULL;
    Py_RETURN_NONE;
}

/* A method that is written in C is a descriptor, which finds its function in a PyMethodDef. That one is changed, for a copy
 * with a function of ours: the descriptor, what is bound of it, and the class's dict stay what they were. A function can
 * only tell by itself which method it stands for, so there is one for each. Nothing of it ever goes: what was bound before
 * it was taken back keeps the copy. */

#define EACH(_)                                                                                                        \
    _(0) _(1) _(2) _(3) _(4) _(5) _(6) _(7) _(8) _(9) _(10) _(11) _(12) _(13) _(14) _(15)                              \
    _(16) _(17) _(18) _(19) _(20) _(21) _(22) _(23) _(24) _(25) _(26) _(27) _(28) _(29) _(30) _(31)
enum { SWAPPED = 32 };

static struct {
    PyMethodDescrObject *descriptor; /* NULL: free */
    PyMethodDef *theirs;
    PyMethodDef ours;
    Method *method; /* NULL: nobody wants to know */
} swapped[SWAPPED];

static PyObject *
swapped_call(int which, PyObject *tensor, PyObject *args, PyObject *kwargs)
{
    PyMethodDef *theirs = swapped[which].theirs;
    Method *method = (Method *)Py_XNewRef((PyObject *)swapped[which].method);
    int plain = method == NULL ? 1 : method_is_plain(method, tensor, args, kwargs);
    PyObject *result = NULL;
    if (plain == 0) {
        PyObject *bound = PyMethod_New(method->waits, tensor);
        if (bound != NULL)
            result = args == NULL ? PyObject_CallNoArgs(bound) : PyObject_Call(bound, args, kwargs);
        Py_XDECREF(bound);
    } else if (plain > 0) {
        result = theirs->ml_flags == METH_NOARGS
                     ? theirs->ml_meth(tensor, NULL)
                     : ((PyCFunctionWithKeywords)(void (*)(void))theirs->ml_meth)(tensor, args, kwargs);
    }
    Py_XDECREF(method);
    return result;
}

#define ONE(i)                                                                                                         \
    static PyObject *swapped_alone_##i(PyObject *tensor, PyObject *none) { return swapped_call(i, tensor, NULL, NULL); } \
    static PyObject *swapped_keywords_##i(PyObject *tensor, PyObject *args, PyObject *kwargs)                          \
    {                                                                                                                  \
        return swapped_call(i, tensor, args, kwargs);                                                                  \
    }
EACH(ONE)
#undef ONE
#define ONE(i) {swapped_alone_##i, (PyCFunction)(void (*)(void))swapped_keywords_##i},
static const struct {
    PyCFunction alone, keywords;
} swapped_functions[SWAPPED] = {EACH(ONE)};
#undef ONE
#undef EACH

/* The index of what stands for a descriptor, or -1. */
static int
swapped_find(PyObject *descriptor, int may_be_free)
{
    for (int i = 0; i < SWAPPED; i++) {
        if (swapped[i].descriptor == (PyMethodDescrObject *)descriptor || (may_be_free && swapped[i].descriptor == NULL))
            return i;
    }
    return -1;
}

/* own_method(descriptor): another one for the same method, which calls torch's function whoever is asked of the first;
 * None: it can't be swapped. */
static PyObject *
own_method(PyObject *self, PyObject *descriptor)
{
    if (Py_TYPE(descriptor) != &PyMethodDescr_Type)
        Py_RETURN_NONE;
    int found = swapped_find(descriptor, 0);
    PyMethodDef *theirs = found < 0 ? ((PyMethodDescrObject *)descriptor)->d_method : swapped[found].theirs;
    if (theirs->ml_flags != METH_NOARGS && theirs->ml_flags != (METH_VARARGS | METH_KEYWORDS))
        Py_RETURN_NONE;
    if (swapped_find(descriptor, 1) < 0)
        Py_RETURN_NONE;
    return PyDescr_NewMethod(PyDescr_TYPE(descriptor), theirs);
}

/* swap_method(descriptor, method): it decides, and its `waits` is called, from now on; without, torch's function is put
 * back. For what `own_method` gave one. */
static PyObject *
swap_method(PyObject *self, PyObject *args)
{
    PyMethodDescrObject *descriptor;
    Method *method = NULL;
    if (!PyArg_ParseTuple(args, "O!|O!", &PyMethodDescr_Type, &descriptor, &MethodType, &method))
        return NULL;
    int which = swapped_find((PyObject *)descriptor, method != NULL);
    if (which < 0) {
        PyErr_SetString(PyExc_ValueError, "it is not swapped, or there is no room for it");
        return NULL;
    }
    if (swapped[which].descriptor == NULL) {
        int alone = descriptor->d_method->ml_flags == METH_NOARGS;
        swapped[which].theirs = descriptor->d_method;
        swapped[which].ours = *descriptor->d_method;
        swapped[which].ours.ml_meth = alone ? swapped_functions[which].alone : swapped_functions[which].keywords;
        swapped[which].descriptor = (PyMethodDescrObject *)Py_NewRef((PyObject *)descriptor);
    }
    Py_XINCREF(method);
    Py_XSETREF(swapped[which].method, method);
    PyMethodDef *ours = &swapped[which].ours, *theirs = swapped[which].theirs;
    if (descriptor->d_method == (method != NULL ? theirs : ours))
        descriptor->d_method = method != NULL ? ours : theirs;
    Py_RETURN_NONE;
}

static PyMethodDef functions[] = {{"own_method", own_method, METH_O, NULL},
                                  {"swap_method", swap_method, METH_VARARGS, NULL},
                                  {"subscript", subscript, METH_VARARGS, NULL},
                                  {"swap_subscripts", swap_subscripts, METH_VARARGS, NULL},
                                  {NULL}};

/* Follow: the calls of a builtin of somebody else's are followed, and nothing of it can be seen.
 *
 * A builtin that takes a tuple and a dict has no `vectorcall` (torch's own, and those of pybind11 2); once it has one,
 * CPython calls that (PyObject_Vectorcall, PyObject_Call; 3.10 to 3.14). One that takes an array and a tuple of names
 * has its own (pybind11 3), which is called from ours. All else about the object stays: which it is, its type and
 * names, its method definition, of whose address its hash is made. One thing is lost: f(**{}) is f().
 *
 * `gate` says whether a call is worth a look: a function without arguments; or (overrides, is_cpu, cpu[, most]), as a
 * Method has them, and then a call is that has to do with another place than the CPU, and `most` arguments at most.
 * Then `begin` gets (args, kwargs or None) and returns None, or what is called with (result, None) or (None, error) once
 * the builtin has returned or raised. What these two raise is raised (see `Patches.fault`), but for want of stack or
 * memory.
 */

enum { FOLLOW_MOST = 64 };

typedef struct {
    PyObject_HEAD
    PyObject *function, *gate, *begin;
    PyObject *overrides, *is_cpu, *cpu; /* borrowed from the gate; NULL: it is a function */
    Py_ssize_t most;
    vectorcallfunc own; /* the builtin's, if it has one */
    char always; /* the gate is open whatever it says */
} Follow;

static Follow *follow_all[FOLLOW_MOST]; /* those in force, each with a reference, from where its address says on */

/* The place in `follow_all` of this function, or a free one where it is NULL; or NULL. */
static inline Follow **
follow_find(PyObject *near, PyObject *function)
{
    size_t at = (size_t)near / sizeof(PyCFunctionObject);
    for (size_t i = 0; i < FOLLOW_MOST; i++) {
        Follow **each = &follow_all[(at + i) % FOLLOW_MOST];
        if (function == NULL ? *each == NULL : *each != NULL && (*each)->function == function)
            return each;
    }
    return NULL;
}

/* Whether the first tensor among the arguments, or in a list of them, is not on the CPU, or `device` names another place;
 * -1 with an exception. */
static int
follow_leaves_cpu(Follow *self, PyObject *args, PyObject *kwargs)
{
    PyObject *first = NULL, *value;
    Py_ssize_t at = 0;
    for (Py_ssize_t i = 0; first == NULL; i++) {
        if (i < PyTuple_GET_SIZE(args))
            value = PyTuple_GET_ITEM(args, i);
        else if (kwargs == NULL || !PyDict_Next(kwargs, &at, NULL, &value))
            break;
        for (int depth = 0; depth < 8 && (PyList_CheckExact(value) || PyTuple_CheckExact(value)) && Py_SIZE(value); depth++)
            value = PySequence_Fast_GET_ITEM(value, 0);
        if (PyObject_TypeCheck(value, PyDescr_TYPE(self->is_cpu)))
            first = Py_NewRef(value);
    }
    int stays = first == NULL ? 1 : tensor_on_cpu(self->overrides, self->is_cpu, first);
    Py_XDECREF(first);
    if (stays == 1 && kwargs != NULL) {
        PyObject *device = PyDict_GetItemWithError(kwargs, str_device);
        if (device != NULL && device != Py_None)
            stays = names_cpu(self->cpu, device);
        else if (device == NULL && PyErr_Occurred())
            stays = -1;
    }
    return stays < 0 ? stays : !stays;
}

/* Whether a call is worth a look; -1 with an exception. */
static int
follow_is_open(Follow *self, PyObject *args, PyObject *kwargs)
{
    if (self->always)
        return 1;
    if (self->is_cpu != NULL) {
        Py_ssize_t count = PyTuple_GET_SIZE(args) + (kwargs == NULL ? 0 : PyDict_GET_SIZE(kwargs));
        return count <= self->most ? follow_leaves_cpu(self, args, kwargs) : 0;
    }
    PyObject *yes = PyObject_CallNoArgs(self->gate);
    Py_XDECREF(yes);
    return yes == NULL ? -1 : yes == Py_True;
}

/* As CPython calls a builtin that has no vectorcall, and one that has. */
static PyObject *
follow_original(PyObject *function, vectorcallfunc own, PyObject *const *stack, size_t nargsf, PyObject *names,
                PyObject *args, PyObject *kwargs)
{
    if (own != NULL)
        return own(function, stack, nargsf, names);
    if (Py_EnterRecursiveCall(" while calling a Python object"))
        return NULL;
    PyObject *result = Py_TYPE(function)->tp_call(function, args, kwargs);
    Py_LeaveRecursiveCall();
    return result;
}

/* Whether what was raised is nobody's fault; then it is cleared. */
static int
follow_had_no_room(void)
{
    if (!PyErr_ExceptionMatches(PyExc_RecursionError) && !PyErr_ExceptionMatches(PyExc_MemoryError))
        return 0;
    PyErr_Clear();
    return 1;
}

/* What `begin` returned; None also where it was not called, NULL with an exception. */
static PyObject *
follow_begin(PyObject *function, PyObject *args, PyObject *kwargs)
{
    Follow **found = follow_find(function, function);
    if (found == NULL)
        return Py_NewRef(Py_None); /* another thread has just restored it */
    Follow *self = (Follow *)Py_NewRef((PyObject *)*found);
    PyObject *given[] = {args, kwargs == NULL ? Py_None : kwargs}, *end = NULL;
    int open = follow_is_open(self, args, kwargs);
    if (open >= 0)
        end = open ? PyObject_Vectorcall(self->begin, given, 2, NULL) : Py_NewRef(Py_None);
    if (end == NULL && follow_had_no_room())
        end = Py_NewRef(Py_None);
    Py_DECREF(self);
    return end;
}

/* Tells `end` of `result`, NULL with an exception; returns the same. Takes the reference. */
static PyObject *
follow_end(PyObject *end, PyObject *result)
{
    PyObject *error = result == NULL ? take_exception() : NULL;
    PyObject *given[] = {result == NULL ? Py_None : result, error == NULL ? Py_None : error};
    PyObject *told = PyObject_Vectorcall(end, given, 2, NULL);
    if (told == NULL && !follow_had_no_room()) {
        Py_XDECREF(result);
        if (error != NULL) {
            PyObject *raised = take_exception();
            PyException_SetContext(raised, error);
            put_exception(raised);
        }
        return NULL;
    }
    Py_XDECREF(told);
    if (error != NULL)
        put_exception(error);
    return result;
}

static PyObject *
follow_call(PyObject *function, PyObject *const *stack, size_t nargsf, PyObject *names)
{
    Py_ssize_t count = PyVectorcall_NARGS(nargsf);
    PyObject *result = NULL, *end = NULL, *kwargs = NULL, *args = PyTuple_New(count);
    if (args == NULL)
        return NULL;
    Follow **found = follow_find(function, function);
    vectorcallfunc own = found != NULL ? (*found)->own : ((PyCFunctionObject *)function)->vectorcall; /* as restored */
    for (Py_ssize_t i = 0; i < count; i++)
        PyTuple_SET_ITEM(args, i, Py_NewRef(stack[i]));
    Py_ssize_t named = names == NULL ? 0 : PyTuple_GET_SIZE(names);
    if (named && (kwargs = PyDict_New()) == NULL)
        goto done;
    for (Py_ssize_t i = 0; i < named; i++) {
        if (PyDict_SetItem(kwargs, PyTuple_GET_ITEM(names, i), stack[count + i]) < 0)
            goto done;
    }
    end = follow_begin(function, args, kwargs);
    if (end != NULL) {
        result = follow_original(function, own, stack, nargsf, names, args, kwargs);
        if (end != Py_None)
            result = follow_end(end, result);
    }
done:
    Py_XDECREF(end);
    Py_XDECREF(kwargs);
    Py_DECREF(args);
    return result;
}

static PyObject *
follow_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *keywords[] = {"function", "gate", "begin", NULL};
    PyObject *function, *gate, *begin;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!OO", keywords, &PyCFunction_Type, &function, &gate, &begin))
        return NULL;
    int flags = PyCFunction_GET_FLAGS(function) & (METH_VARARGS | METH_KEYWORDS | METH_FASTCALL | METH_O | METH_NOARGS);
    vectorcallfunc own = ((PyCFunctionObject *)function)->vectorcall;
    int takes_tuple = flags == (METH_VARARGS | METH_KEYWORDS) && own == NULL;
    int takes_array = flags == (METH_FASTCALL | METH_KEYWORDS) && own != NULL;
    if (!PyCFunction_CheckExact(function) || own == follow_call || !(takes_tuple || takes_array)) {
        PyErr_SetString(PyExc_TypeError, "it is no builtin that takes keywords, or is followed already");
        return NULL;
    }
    PyObject *overrides = NULL, *is_cpu = NULL, *cpu = NULL;
    Py_ssize_t most = PY_SSIZE_T_MAX;
    if (PyTuple_Check(gate)
        && !PyArg_ParseTuple(gate, "OO!O|n;a gate is (overrides, is_cpu, cpu[, most])", &overrides, &PyGetSetDescr_Type,
                             &is_cpu, &cpu, &most))
        return NULL;
    Follow **free = follow_find(function, NULL);
    if (free == NULL) {
        PyErr_SetString(PyExc_ValueError, "so many can't be followed");
        return NULL;
    }
    Follow *self = (Follow *)type->tp_alloc(type, 0);
    if (self == NULL)
        return NULL;
    self->function = Py_NewRef(function);
    self->gate = Py_NewRef(gate);
    self->begin = Py_NewRef(begin);
    self->own = own;
    self->overrides = overrides;
    self->is_cpu = is_cpu;
    self->cpu = cpu;
    self->most = most;
    *free = (Follow *)Py_NewRef((PyObject *)self);
    ((PyCFunctionObject *)function)->vectorcall = follow_call;
    return (PyObject *)self;
}

/* Calls that are open, and this may be called from one, go on to their end. Another one's is left alone. */
static PyObject *
follow_restore(Follow *self, PyObject *Py_UNUSED(ignored))
{
    Follow **found = follow_find(self->function, self->function);
    if (found != NULL && *found == self) {
        PyCFunctionObject *function = (PyCFunctionObject *)self->function;
        if (function->vectorcall == follow_call)
            function->vectorcall = self->own;
        *found = NULL;
        Py_DECREF(self);
    }
    Py_RETURN_NONE;
}

static PyMemberDef follow_members[] = {{"always", T_BOOL, offsetof(Follow, always), 0, NULL}, {NULL}};

static PyMethodDef follow_methods[] = {{"restore", (PyCFunction)follow_restore, METH_NOARGS, NULL}, {NULL}};

static int
follow_traverse(Follow *self, visitproc visit, void *arg)
{
    Py_VISIT(self->function);
    Py_VISIT(self->gate);
    Py_VISIT(self->begin);
    return 0;
}

static void
follow_dealloc(Follow *self)
{
    PyObject_GC_UnTrack(self);
    Py_XDECREF(self->function);
    Py_XDECREF(self->gate);
    Py_XDECREF(self->begin);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

static PyTypeObject FollowType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "otel_dl.recording._native.Follow",
    .tp_basicsize = sizeof(Follow),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .tp_new = follow_new,
    .tp_members = follow_members,
    .tp_methods = follow_methods,
    .tp_traverse = (traverseproc)follow_traverse,
    .tp_dealloc = (destructor)follow_dealloc,
};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, .m_name = "otel_dl.recording._native", .m_size = -1,
                                    .m_methods = functions};

PyMODINIT_FUNC
PyInit__native(void)
{
    static struct {
        const char *name;
        PyTypeObject *type;
    } types[] = {{"StepState", &StepType}, {"LaneState", &LaneType},       {"SourceState", &SourceType},
                 {"Phase", &PhaseType},    {"Forward", &ForwardType},      {"Next", &NextType},
                 {"FastPath", &FastPathType}, {"Returned", &ReturnedType},
                 {"WorkerState", &WorkerType},
                 {"Method", &MethodType},
                 {"Follow", &FollowType},
                 {"Get", &GetType},
                 {"Put", &PutType}};
    static struct {
        PyObject **name;
        const char *text;
    } names[] = {{&str_training, "training"},
                 {&str_modules, "_modules"},
                 {&str_parameters, "_parameters"},
                 {&str_compiled_call_impl, "_compiled_call_impl"},
                 {&str_call_impl, "_call_impl"},
                 {&str_source, "_otel_dl"},
                 {&str_device, "device"},
                 {&str_rcvd_idx, "_rcvd_idx"},
                 {&empty_string, ""}};
    for (size_t i = 0; i < sizeof(names) / sizeof(names[0]); i++) {
        *names[i].name = PyUnicode_InternFromString(names[i].text);
        if (*names[i].name == NULL)
            return NULL;
    }
    zero = PyLong_FromLong(0);
    if (zero == NULL)
        return NULL;
    PyObject *copying = PyImport_ImportModule("copy");
    copy = copying == NULL ? NULL : PyObject_GetAttrString(copying, "copy");
    Py_XDECREF(copying);
    if (copy == NULL)
        return NULL;
#ifndef __linux__
    PyObject *time = PyImport_ImportModule("time");
    perf_counter_ns = time == NULL ? NULL : PyObject_GetAttrString(time, "perf_counter_ns");
    Py_XDECREF(time);
    if (perf_counter_ns == NULL)
        return NULL;
#endif
    PyObject *self = PyModule_Create(&module);
    for (size_t i = 0; self != NULL && i < sizeof(types) / sizeof(types[0]); i++) {
        if (PyType_Ready(types[i].type) < 0
            || PyModule_AddObjectRef(self, types[i].name, (PyObject *)types[i].type) < 0)
            Py_CLEAR(self);
    }
    if (self != NULL && PyModule_AddStringConstant(self, "SOURCE", SOURCE) < 0)
        Py_CLEAR(self);
#define ONE(name, value)                                                                                              \
    if (self != NULL && PyModule_AddIntConstant(self, #name, name) < 0)                                               \
        Py_CLEAR(self);
    CONSTANTS(ONE)
#undef ONE
    PyObject *check = PyLong_FromLongLong(CHECK);
    if (self != NULL && (check == NULL || PyModule_AddObjectRef(self, "CHECK", check) < 0))
        Py_CLEAR(self);
    Py_XDECREF(check);
    return self;
}
