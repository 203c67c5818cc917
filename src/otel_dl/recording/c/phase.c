/* Phase: a call is a phase of a step. */

#include "native.h"

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
PyObject *
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

PyObject *
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
