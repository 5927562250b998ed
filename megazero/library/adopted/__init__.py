"""Adopts what a program has made already: process groups, a DeviceMesh, DTensors."""
