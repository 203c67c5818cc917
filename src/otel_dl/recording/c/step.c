/* Step: the part of `records.Step` that the ordinary step changes. */

#include "native.h"

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

PyTypeObject StepType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "otel_dl.recording._native.StepState",
    .tp_basicsize = sizeof(Step),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC,
    .tp_new = PyType_GenericNew,
    .tp_members = step_members,
    .tp_traverse = (traverseproc)step_traverse,
    .tp_clear = (inquiry)step_clear,
    .tp_dealloc = (destructor)step_dealloc,
};

/* Adds (kind, start, end, None, batch) to the step; -1 with an exception set. */
int
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
