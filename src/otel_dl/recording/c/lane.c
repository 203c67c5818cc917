/* Lane: what a thread has open. */

#include "native.h"

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

PyTypeObject LaneType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "otel_dl.recording._native.LaneState",
    .tp_basicsize = sizeof(Lane),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC,
    .tp_new = PyType_GenericNew,
    .tp_members = lane_members,
    .tp_traverse = (traverseproc)lane_traverse,
    .tp_clear = (inquiry)lane_clear,
    .tp_dealloc = (destructor)lane_dealloc,
};
