/* Worker: the part of `workers.loop.Worker` that each fetch changes, and its status page and ring. */

#include "native.h"
#include <unistd.h>

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

PyTypeObject WorkerType = {
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
