/* Next: a batch is asked for; the step in hand ends, and the next one begins. */

#include "native.h"

enum { NOTHING = 1 }; /* the Adler-32 of no samples */

/* In the page: this batch is read, by whom the page is, since `start`; which samples, nobody knows here. */
static inline void
page_batch(FastPath *self, int64_t epoch, int64_t index, int64_t start)
{
    if (self->batch_block != NULL)
        BLOCK(self->batch_block, NOTHING, epoch, index, start, 0, FORM_NONE);
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

PyObject *
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
