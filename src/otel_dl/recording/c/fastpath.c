/* FastPath: the thread whose steps are simply recorded, and how long they may be. One a run. */

#include "native.h"

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

PyTypeObject FastPathType = {
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
